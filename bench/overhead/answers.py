"""An engine's answers, in the form of vLLM 0.33, as the bytes that go over the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.overhead.prompts import ANSWER_PIECES, MODEL, token

Json = dict[str, Any]

BLOCK_SIZE = 16
_HEAD = b"HTTP/1.1 %d OK\r\nserver: uvicorn\r\ncontent-type: %s\r\n"
_LAST = b"0\r\n\r\n"


@dataclass(frozen=True)
class Generation:
    """One request, as far as its answer depends on it."""

    prompt: Sequence[int]
    tells_ids: bool
    """Whether ``return_token_ids`` was asked for."""
    pieces: Sequence[str]
    params: Json | None
    """The answer's ``kv_transfer_params``."""


def params(role: str, tokens: int) -> Json:
    """What a worker says it holds for ``tokens`` tokens."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 1 - (-tokens // BLOCK_SIZE)))],
        "remote_engine_id": f"6f1f5fd2-2e9b-4c80-8e0c-{role}",
        "remote_request_id": "chatcmpl-4b0f8c5e1d4f4f3f9c9d5c7a8e6b2f10",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "remote_num_tokens": tokens,
    }


def whole(one: Generation) -> bytes:
    """The answer in one piece."""
    ids = [token(piece) for piece in one.pieces]
    message = {
        "role": "assistant",
        "content": "".join(one.pieces),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids if one.tells_ids else None,
        "routed_experts": None,
    }
    usage = {
        "prompt_tokens": len(one.prompt),
        "total_tokens": len(one.prompt) + len(ids),
        "completion_tokens": len(ids),
        "prompt_tokens_details": None,
    }
    answer = {
        **_opening("chat.completion"),
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.33.0",
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": list(one.prompt) if one.tells_ids else None,
        "prompt_text": None,
        "kv_transfer_params": one.params,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return response(msgspec.json.encode(answer))


def stream(one: Generation) -> list[bytes]:
    """The answer as it streams: the head, an event for each token (the first with the role), the end."""
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    first = {
        **_opening("chat.completion.chunk"),
        "choices": [role],
        "prompt_token_ids": list(one.prompt) if one.tells_ids else None,
        "prompt_text": None,
    }
    parts = [_HEAD % (200, b"text/event-stream; charset=utf-8") + b"transfer-encoding: chunked\r\n\r\n"]
    for number, piece in enumerate(one.pieces, 1):
        last = number == len(one.pieces)
        choice: Json = {"index": 0, "delta": {"content": piece}, "logprobs": None, "finish_reason": None}
        choice["token_ids"] = [token(piece)] if one.tells_ids else None
        chunk: Json = _opening("chat.completion.chunk") | {"choices": [choice]}
        chunk["kv_transfer_params"] = one.params if last else None
        if last:
            choice |= {"finish_reason": "length", "stop_reason": None}
            chunk["system_fingerprint"] = "vllm-0.33.0"
        parts.append((_event(first) if number == 1 else b"") + _event(chunk))
    return [*parts, _chunk(b"data: [DONE]\n\n") + _LAST]


def rendered(prompt: Iterable[int]) -> bytes:
    """A prompt's token ids."""
    answer = {
        "request_id": "chatcmpl-4b0f8c5e1d4f4f3f9c9d5c7a8e6b2f10",
        "token_ids": list(prompt),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": {"temperature": 0.7, "max_tokens": len(ANSWER_PIECES)},
        "model": MODEL,
        "stream": False,
        "kv_transfer_params": None,
    }
    return response(msgspec.json.encode(answer))


def response(body: bytes, status: int = 200, content_type: bytes = b"application/json") -> bytes:
    """An HTTP answer."""
    return _HEAD % (status, content_type) + b"content-length: %d\r\n\r\n" % len(body) + body


def _opening(kind: str) -> Json:
    return {"id": "chatcmpl-4b0f8c5e1d4f4f3f9c9d5c7a8e6b2f10", "object": kind, "created": 1790000000, "model": MODEL}


def _event(data: Json) -> bytes:
    return _chunk(b"data: " + msgspec.json.encode(data) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)

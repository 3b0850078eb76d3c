"""Streamed answers, event by event."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from .answers import (
    chat_logprobs,
    failure_body,
    finish_reason,
    output_for,
    steps,
    text_logprobs,
    usage,
)
from .core import Core
from .output import Output
from .prepare import Prepared
from .sequence import Sequenced
from .transfer import EngineDied, KVLoadFailed

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def stream_events(core: Core, prepared: Prepared) -> AsyncGenerator[bytes, None]:
    """The events of an answer. What fails in the engine becomes an event; the status is out by then."""
    stream = _Stream(core, prepared)
    try:
        async with contextlib.aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                yield event(chunk)
    except (KVLoadFailed, EngineDied) as failure:
        yield event(failure_body(failure))
    yield DONE


class _Stream:
    def __init__(self, core: Core, prepared: Prepared) -> None:
        self._core = core
        self._prepared = prepared
        self._created = int(time.time())
        options = prepared.body.get("stream_options") or {}
        self._usage = bool(options.get("include_usage"))
        self._continuous = self._usage and bool(options.get("continuous_usage_stats"))
        self._outputs: list[Output] = []

    async def chunks(self) -> AsyncGenerator[Json, None]:
        prepared = self._prepared
        for index, seq in enumerate(prepared.sequences):
            output = output_for(prepared)
            self._outputs.append(output)
            count = 0
            async with contextlib.aclosing(steps(self._core, seq, output)) as tokens:
                async for token, deltas in tokens:
                    if count == 0 and prepared.chat:
                        yield self._first(index)
                    count += 1
                    say = self._chat if prepared.chat else self._text
                    for chunk in say(index, seq, output, token, deltas, count):
                        yield chunk
        if self._usage:
            yield self._chunk([]) | {
                "usage": usage(self._core, prepared, self._outputs),
                "system_fingerprint": f"vllm-{self._core.options.version}-sim",
            }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {
            "id": self._prepared.request_id,
            "object": "chat.completion.chunk" if self._prepared.chat else "text_completion",
            "created": self._created,
            "model": self._prepared.body.get("model") or self._core.options.model,
            "choices": choices,
        }
        if self._continuous and choices:
            chunk["usage"] = usage(self._core, self._prepared, self._outputs)
        if self._core.options.unknown_members:
            chunk["sim_unknown"] = {"kept": [True, None, 1.5]}
        return chunk

    def _first(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = list(self._prepared.prompts[0].ids) if self._prepared.shows_ids else None
        return self._chunk([choice]) | {"prompt_token_ids": ids, "prompt_text": None}

    def _chat(
        self, index: int, seq: Sequenced, output: Output, token: int, deltas: list[Json], count: int
    ) -> list[Json]:
        prepared = self._prepared
        hidden = prepared.hides_reasoning
        if hidden:
            deltas = [delta for delta in deltas if "reasoning" not in delta]
        logprobs = None if hidden else chat_logprobs(prepared.body, [token])
        shows = prepared.shows_ids and not hidden
        ended = seq.finish_reason
        if not deltas and not ended and not shows and logprobs is None:
            return []
        chunks = []
        for place, delta in enumerate(deltas or [{}]):
            last = place == max(0, len(deltas) - 1)
            choice: Json = {
                "index": index,
                "delta": delta,
                "logprobs": logprobs if last else None,
                "finish_reason": None,
                "token_ids": ([token] if last else []) if shows else None,
            }
            if last and ended:
                called = bool(output.tool_calls)
                choice["finish_reason"] = finish_reason(prepared, seq, called=called)
                choice["stop_reason"] = seq.stop_reason
            chunks.append(self._ending(self._chunk([choice]), seq if last and ended else None))
        return chunks

    def _text(
        self, index: int, seq: Sequenced, output: Output, token: int, deltas: list[Json], count: int
    ) -> list[Json]:
        text = "".join(delta["content"] for delta in deltas)
        offset = len(output.text) - len(text)
        choice = {
            "index": index,
            "text": text,
            "logprobs": text_logprobs(self._prepared.body, [token], offset),
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "prompt_token_ids": list(seq.prompt) if count == 1 and self._prepared.shows_ids else None,
            "token_ids": [token] if self._prepared.shows_ids else None,
        }
        return [self._ending(self._chunk([choice]), seq if seq.finish_reason else None)]

    def _ending(self, chunk: Json, ended: Sequenced | None) -> Json:
        if self._core.options.streams_carry_kv_params:
            chunk["kv_transfer_params"] = ended.kv_transfer_params if ended else None
        if ended and not self._usage:
            chunk["system_fingerprint"] = f"vllm-{self._core.options.version}-sim"
        return chunk

"""Answers in the shape of the OpenAI API, as vLLM fills it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from .core import Core
from .output import Output
from .prepare import Prepared
from .sequence import Sequenced
from .tokenizer import decode
from .transfer import EngineDied, KVLoadFailed
from .validation import error_body

Json = dict[str, Any]


def failure_body(failure: KVLoadFailed | EngineDied) -> Json:
    """How an engine reports a request that failed inside it."""
    if isinstance(failure, KVLoadFailed):
        return error_body("Internal server error", "InternalServerError", 500)
    text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return error_body(text, "InternalServerError", 500)


def output_for(prepared: Prepared) -> Output:
    return Output(
        chat=prepared.chat,
        tools=prepared.parses_tools,
        stops=prepared.stops,
        keep_stop=bool(prepared.body.get("include_stop_str_in_output")),
    )


async def steps(core: Core, seq: Sequenced, output: Output) -> AsyncGenerator[tuple[int, list[Json]], None]:
    """Each generated token with what it lets be said. Ends at a stop string, too.

    A stop string is found outside the engine, which only hears of it as an abort: such a turn
    is not retained and has no KV parameters, unless the engine ended at that very token.
    """
    async with contextlib.aclosing(core.generate(seq)) as tokens:
        async for token in tokens:
            deltas = output.feed(token, last=seq.finish_reason is not None)
            if output.stopped is not None:
                if seq.finish_reason is None:
                    await tokens.aclose()
                seq.finish_reason, seq.stop_reason = "stop", output.stopped
            yield token, deltas
            if output.stopped is not None:
                return


async def full_answer(core: Core, prepared: Prepared) -> Json:
    """The whole answer of a request that does not stream."""
    outputs = []
    for seq in prepared.sequences:
        output = output_for(prepared)
        async for _ in steps(core, seq, output):
            pass
        outputs.append(output)
    make = _chat_choice if prepared.chat else _text_choice
    answer: Json = {
        "id": prepared.request_id,
        "object": "chat.completion" if prepared.chat else "text_completion",
        "created": int(time.time()),
        "model": prepared.body.get("model") or core.options.model,
        "choices": [
            make(prepared, index, seq, output)
            for index, (seq, output) in enumerate(zip(prepared.sequences, outputs, strict=True))
        ],
        "service_tier": None,
        "system_fingerprint": f"vllm-{core.options.version}-sim",
        "usage": usage(core, prepared, outputs),
    }
    if prepared.chat:
        ids = list(prepared.prompts[0].ids) if prepared.shows_ids else None
        answer |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    # Of several sequences the parameters of one are told; what the others hold is orphaned.
    told = prepared.sequences[-1 if prepared.chat else 0]
    answer |= {"kv_transfer_params": told.kv_transfer_params, "ec_transfer_params": None, "metrics": None}
    if core.options.unknown_members:
        answer["sim_unknown"] = {"kept": [True, None, 1.5]}
    return answer


def usage(core: Core, prepared: Prepared, outputs: list[Output]) -> Json:
    prompt = sum(len(one.ids) for one in prepared.prompts)
    generated = sum(len(output.tokens) for output in outputs)
    first = prepared.sequences[0]
    cached = {"cached_tokens": first.cached_tokens + first.external_tokens}
    details = {"reasoning_tokens": sum(output.reasoning_tokens for output in outputs)}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": cached if core.options.prompt_tokens_details else None,
        "completion_tokens_details": details if prepared.chat else None,
    }


def finish_reason(prepared: Prepared, seq: Sequenced, *, called: bool) -> str | None:
    """`tool_calls` where the client let the model choose, else why the engine ended."""
    named = isinstance(prepared.body.get("tool_choice"), dict)
    if called and not named and seq.finish_reason == "stop":
        return "tool_calls"
    return seq.finish_reason


def _chat_choice(prepared: Prepared, index: int, seq: Sequenced, output: Output) -> Json:
    hidden = prepared.hides_reasoning
    content = output.content or (None if output.tool_calls or output.reasoning else "")
    message: Json = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None if hidden else output.reasoning or None,
    }
    if output.tool_calls:
        message["tool_calls"] = output.tool_calls
    return {
        "index": index,
        "message": message,
        "logprobs": None if hidden else chat_logprobs(prepared.body, output.tokens),
        "finish_reason": finish_reason(prepared, seq, called=bool(output.tool_calls)),
        "stop_reason": seq.stop_reason,
        "token_ids": list(output.tokens) if prepared.shows_ids and not hidden else None,
        "routed_experts": None,
    }


def _text_choice(prepared: Prepared, index: int, seq: Sequenced, output: Output) -> Json:
    echo = decode(seq.prompt) if prepared.body.get("echo") else ""
    return {
        "index": index,
        "text": echo + output.text,
        "logprobs": text_logprobs(prepared.body, output.tokens, 0),
        "finish_reason": seq.finish_reason,
        "stop_reason": seq.stop_reason,
        "token_ids": list(output.tokens) if prepared.shows_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": list(seq.prompt) if prepared.shows_ids else None,
        "routed_experts": None,
    }


def chat_logprobs(body: Json, tokens: list[int]) -> Json | None:
    if not body.get("logprobs"):
        return None
    wanted = body.get("top_logprobs") or 0
    return {"content": [_logprob(token) | {"top_logprobs": _tops(token, wanted)} for token in tokens]}


def text_logprobs(body: Json, tokens: list[int], offset: int) -> Json | None:
    if body.get("logprobs") is None:
        return None
    texts = [decode([token], skip_special=False) for token in tokens]
    starts = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
    tops = [{top["token"]: top["logprob"] for top in _tops(t, body["logprobs"] or 1)} for t in tokens]
    return {
        "text_offset": starts,
        "token_logprobs": [_logprob(token)["logprob"] for token in tokens],
        "tokens": texts,
        "top_logprobs": tops,
    }


def _tops(token: int, count: int) -> list[Json]:
    return [_logprob(token), *(_logprob(97 + (token + other) % 26) for other in range(1, count))][:count]


def _logprob(token: int) -> Json:
    text = decode([token], skip_special=False)
    return {"token": text, "logprob": -0.1 - token % 7 / 10, "bytes": list(text.encode())}

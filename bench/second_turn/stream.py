"""Ask for a streamed chat completion, and note when its first content came.

aiohttp and msgspec rather than what a client would usually take: their own time is part of every
number, and least in these two.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from bench.failure import BenchFailure

Json = dict[str, Any]

CHAT = "/v1/chat/completions"


@dataclass
class Streamed:
    """A complete answer."""

    ttft: float = 0.0
    """Seconds from when the turn began until the event with the first content was here; 0 before that."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    params: Json | None = None
    """``kv_transfer_params``, where an engine was asked itself."""
    headers: Mapping[str, str] = field(default_factory=dict)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: Json | None = None
    error: Json | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def streamed(
    session: aiohttp.ClientSession, url: str, body: Json, began: float, headers: Mapping[str, str] | None = None
) -> Streamed:
    """The answer to ``body``, a chat request with ``stream``, of a turn that ``began`` then (``perf_counter``).

    Raises ``BenchFailure`` unless it is a complete answer with content.
    """
    answer = Streamed()
    finished = False
    rest = b""
    async with session.post(url + CHAT, data=msgspec.json.encode(body), headers=headers) as response:
        answer.headers = dict(response.headers)
        if response.status != 200:
            raise BenchFailure(f"{url} answered {response.status}: {(await response.text())[:500]}")
        async for part in response.content.iter_any():
            # Before it is parsed: prompts come back as thousands of ids.
            arrived = time.perf_counter()
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    finished = True
                    continue
                if _take(_decode(data), answer, url) and not answer.ttft:
                    answer.ttft = arrived - began
    if not (finished and answer.ttft and answer.ids and answer.prompt_ids):
        raise BenchFailure(f"{url} did not answer to the end: {answer.text!r}")
    return answer


def _take(chunk: _Chunk, answer: Streamed, url: str) -> bool:
    """Add ``chunk`` to ``answer``; whether it had content."""
    if chunk.error is not None:
        raise BenchFailure(f"{url} broke off: {chunk.error}")
    answer.prompt_ids = chunk.prompt_token_ids or answer.prompt_ids
    answer.params = chunk.kv_transfer_params or answer.params
    before = len(answer.text)
    for choice in chunk.choices:
        answer.text += choice.delta.content or ""
        answer.ids += choice.token_ids or []
    return len(answer.text) > before

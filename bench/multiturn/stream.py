"""An answer that comes as a stream of events, put together, with its times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.multiturn.talk import Json

SHOWN = 300
"""Letters of an error that are shown."""


class TurnFailed(Exception):
    """No complete answer came. The text is for people."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Times are seconds; what the server did not tell is None."""

    message: Json
    """As it goes into the history."""
    told: bytes
    """All that was generated, for comparing: equal for equal answers."""
    prompt_tokens: int | None
    output_tokens: int | None
    ttft: float
    tpot: float | None
    seconds: float
    outcome: str | None
    reason: str | None
    reused_tokens: int | None


class _Call(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Call | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @property
    def anything(self) -> bool:
        """Whether some of the answer is in it."""
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Stream:
    """An answer as it comes."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, Json] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    first: float | None = None
    last: float = 0.0
    done: bool = False

    def take(self, data: bytes, now: float) -> None:
        """One event that came ``now``. Raises ``TurnFailed``."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            raise TurnFailed(f"an event that is no chunk: {data[:SHOWN].decode(errors='replace')} ({error})") from error
        if chunk.error is not None:
            raise TurnFailed(f"the stream broke off: {json.dumps(chunk.error)[:SHOWN]}")
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            if choice.delta.anything:
                self.first = now if self.first is None else self.first
                self.last = now
                self._add(choice.delta)

    def _add(self, delta: _Delta) -> None:
        self.content.append(delta.content or "")
        self.reasoning.append(delta.reasoning or delta.reasoning_content or "")
        for call in delta.tool_calls or []:
            made = self.calls.setdefault(
                call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            made["id"] = call.id or made["id"]
            if call.function is not None:
                made["function"]["name"] += call.function.name or ""
                made["function"]["arguments"] += call.function.arguments or ""

    @property
    def message(self) -> Json:
        """The assistant's message, as clients send it back: without its reasoning."""
        message: Json = {"role": "assistant", "content": "".join(self.content)}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message

    @property
    def told(self) -> bytes:
        """What was generated; ids of tool calls are drawn anew each time, and are left out."""
        calls = [self.calls[index]["function"] for index in sorted(self.calls)]
        return msgspec.json.encode(["".join(self.content), "".join(self.reasoning), calls])

    def answer(self, began: float, ended: float, told: Mapping[str, str]) -> Answer:
        """The whole, of a request that was sent when it ``began``; ``told`` are headers in small letters.

        Raises ``TurnFailed`` if it is not whole.
        """
        if not self.done:
            raise TurnFailed("the stream ended without its end mark")
        if self.first is None:
            # Nothing but an end was generated: that, too, is an answer.
            self.first = self.last = ended
        tokens = self.usage.completion_tokens
        reused = told.get("x-turnback-reused-tokens", "")
        return Answer(
            message=self.message,
            told=self.told,
            prompt_tokens=self.usage.prompt_tokens,
            output_tokens=tokens,
            ttft=self.first - began,
            tpot=(self.last - self.first) / (tokens - 1) if tokens and tokens > 1 else None,
            seconds=ended - began,
            outcome=told.get("x-turnback-reuse"),
            reason=told.get("x-turnback-reason"),
            reused_tokens=int(reused) if reused.isdecimal() else None,
        )

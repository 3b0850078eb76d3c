"""One server's OpenAI API, as the bench needs it: what is served, and one streamed turn with its times."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from bench.failure import BenchFailure
from bench.multiturn.talk import Json

CHAT = "/v1/chat/completions"
_SHOWN = 300
"""Letters of an error that are shown."""


class TurnFailed(Exception):
    """No complete answer came. The text is for people."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    name: str
    vllm: bool
    max_length: int | None
    """Tokens of prompt and answer."""


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


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class _Stream:
    """An answer as it comes."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, Json] = field(default_factory=dict)
    usage: _Usage = field(default_factory=_Usage)
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
            raise TurnFailed(
                f"an event that is no chunk: {data[:_SHOWN].decode(errors='replace')} ({error})"
            ) from error
        if chunk.error is not None:
            raise TurnFailed(f"the stream broke off: {json.dumps(chunk.error)[:_SHOWN]}")
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


class Client:
    """Asks the server at ``url``; a context manager."""

    def __init__(self, url: str, *, api_key: str | None, timeout: float, connections: int) -> None:
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = url
        # Idle connections are closed by many servers after 5 s, and a pause is longer.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=4),
            timeout=aiohttp.ClientTimeout(total=timeout),
            headers=headers,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self, name: str | None) -> Model:
        """The model called ``name``, else the first. Raises ``BenchFailure``."""
        status, body = await self.get("/v1/models")
        if status != 200:
            raise BenchFailure(f"{self.url}/v1/models answered {status}: {body[:_SHOWN]}")
        try:
            served = {model["id"]: model for model in json.loads(body)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise BenchFailure(f"{self.url}/v1/models is not a list of models: {body[:_SHOWN]}") from error
        chosen = served.get(name) if name is not None else next(iter(served.values()), None)
        if chosen is None:
            raise BenchFailure(f"model: {self.url} serves {', '.join(served) or 'none'}, not {name or 'one'}")
        length = chosen.get("max_model_len")
        return Model(chosen["id"], chosen.get("owned_by") == "vllm", length if isinstance(length, int) else None)

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body. Raises ``BenchFailure`` if nobody answers."""
        try:
            async with self._session.get(self.url + path) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BenchFailure(f"{self.url} does not answer: {_said(error)}") from error

    async def delete(self, path: str) -> None:
        """Ask for it; whatever comes of that."""
        try:
            async with self._session.delete(self.url + path) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return

    async def count(self, body: Json) -> int:
        """Prompt tokens of ``body``, a chat request. Raises ``BenchFailure``."""
        # In one piece, which more servers tell the lengths of.
        sent = msgspec.json.encode(body | {"max_tokens": 1})
        try:
            async with self._session.post(self.url + CHAT, data=sent) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BenchFailure(f"{self.url} does not answer: {_said(error)}") from error
        if response.status != 200:
            raise BenchFailure(f"{self.url}: status {response.status}: {content[:_SHOWN].decode(errors='replace')}")
        try:
            usage = msgspec.json.decode(content, type=_Whole).usage
        except msgspec.DecodeError as error:
            raise BenchFailure(f"{self.url}: no chat completion: {error}") from error
        if usage is None or usage.prompt_tokens is None:
            raise BenchFailure(f"{self.url} does not tell how long a prompt was (usage), so no text can be measured")
        return usage.prompt_tokens

    async def ask(self, body: Json, headers: Mapping[str, str]) -> Answer:
        """The answer to a chat request, streamed. Raises ``TurnFailed``."""
        sent = msgspec.json.encode(body | {"stream": True, "stream_options": {"include_usage": True}})
        stream = _Stream()
        began = time.perf_counter()
        try:
            async with self._session.post(self.url + CHAT, data=sent, headers=headers) as response:
                if response.status != 200:
                    text = (await response.text())[:_SHOWN]
                    raise TurnFailed(f"status {response.status}: {text}", response.status)
                told = dict(response.headers)
                async for line in response.content:
                    if line.startswith(b"data:"):
                        stream.take(line[5:].strip(), time.perf_counter())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TurnFailed(_said(error)) from error
        return _answer(stream, began, {name.lower(): value for name, value in told.items()})


def _answer(stream: _Stream, began: float, told: Mapping[str, str]) -> Answer:
    ended = time.perf_counter()
    if not stream.done:
        raise TurnFailed("the stream ended without its end mark")
    if stream.first is None:
        # Nothing but an end was generated: that, too, is an answer.
        stream.first = stream.last = ended
    tokens = stream.usage.completion_tokens
    reused = told.get("x-turnback-reused-tokens", "")
    return Answer(
        message=stream.message,
        told=stream.told,
        prompt_tokens=stream.usage.prompt_tokens,
        output_tokens=tokens,
        ttft=stream.first - began,
        tpot=(stream.last - stream.first) / (tokens - 1) if tokens and tokens > 1 else None,
        seconds=ended - began,
        outcome=told.get("x-turnback-reuse"),
        reason=told.get("x-turnback-reason"),
        reused_tokens=int(reused) if reused.isdecimal() else None,
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

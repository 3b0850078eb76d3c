"""One server's OpenAI API, as the bench needs it: what is served, and one streamed turn with its times."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import aiohttp
import msgspec

from bench.failure import BenchFailure
from bench.multiturn.stream import SHOWN, Answer, Stream, TurnFailed, Usage
from bench.multiturn.talk import Json

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    name: str
    vllm: bool
    max_length: int | None
    """Tokens of prompt and answer."""


class _Whole(msgspec.Struct):
    usage: Usage | None = None


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
            raise BenchFailure(f"{self.url}/v1/models answered {status}: {body[:SHOWN]}")
        try:
            served = {model["id"]: model for model in json.loads(body)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise BenchFailure(f"{self.url}/v1/models is not a list of models: {body[:SHOWN]}") from error
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
            raise BenchFailure(f"{self.url}: status {response.status}: {content[:SHOWN].decode(errors='replace')}")
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
        stream = Stream()
        began = time.perf_counter()
        try:
            async with self._session.post(self.url + CHAT, data=sent, headers=headers) as response:
                if response.status != 200:
                    text = (await response.text())[:SHOWN]
                    raise TurnFailed(f"status {response.status}: {text}", response.status)
                told = dict(response.headers)
                async for line in response.content:
                    if line.startswith(b"data:"):
                        stream.take(line[5:].strip(), time.perf_counter())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TurnFailed(_said(error)) from error
        return stream.answer(began, time.perf_counter(), {name.lower(): value for name, value in told.items()})


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""The ways to serve a conversation that are compared."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import aiohttp

from bench.failure import BenchFailure
from bench.second_turn.bare import BareClient, Held
from bench.second_turn.conversation import Message, sampling
from bench.second_turn.stream import Streamed, streamed


@dataclass(frozen=True)
class Turn:
    """An answer, and how many tokens of the last turn's KV were reused for it."""

    answer: Streamed
    reused: int


class Arm(ABC):
    """One way to serve a conversation, with reuse or without."""

    def __init__(self, name: str, *, reuse: bool) -> None:
        self.name = name
        self.reuse = reuse

    @abstractmethod
    async def turn(self, conversation: str, messages: list[Message]) -> Turn:
        """The next turn. Without reuse decode holds nothing of it soon after. Raises ``BenchFailure``."""

    @abstractmethod
    async def end(self, conversation: str) -> None:
        """The conversation is over: decode holds nothing of it soon after."""


class Bare(Arm):
    """No router: the client speaks the engines' protocol."""

    def __init__(self, name: str, client: BareClient, *, reuse: bool) -> None:
        super().__init__(name, reuse=reuse)
        self._client = client
        self._held: dict[str, Held] = {}

    async def turn(self, conversation: str, messages: list[Message]) -> Turn:
        """See ``Arm.turn``."""
        answer, held, reused = await self._client.turn(messages, self._held.pop(conversation, None))
        if self.reuse:
            self._held[conversation] = held
        else:
            await self._client.release(held)
        return Turn(answer, reused)

    async def end(self, conversation: str) -> None:
        """See ``Arm.end``."""
        if (held := self._held.pop(conversation, None)) is not None:
            await self._client.release(held)


class Routed(Arm):
    """A client of the router at ``url``, like any other but for asking for token ids."""

    def __init__(self, name: str, session: aiohttp.ClientSession, url: str, model: str, *, reuse: bool) -> None:
        super().__init__(name, reuse=reuse)
        self._session = session
        self._url = url
        self._model = model

    async def turn(self, conversation: str, messages: list[Message]) -> Turn:
        """See ``Arm.turn``: the router itself releases what it will not reuse."""
        began = time.perf_counter()
        body = sampling(self._model) | {"messages": messages}
        answer = await streamed(self._session, self._url, body, began, {"x-conversation-id": conversation})
        outcome = answer.headers["x-turnback-reuse"]
        if outcome not in (("first", "hit", "partial") if self.reuse else ("off",)):
            raise BenchFailure(f"reuse came out as {outcome!r} ({answer.headers['x-turnback-reason']})")
        return Turn(answer, int(answer.headers["x-turnback-reused-tokens"]))

    async def end(self, conversation: str) -> None:
        """See ``Arm.end``.

        One more turn, which has nothing in common with those before, so that the router releases what
        they left; and it ends at a stop string, so that the engine retains nothing of it.
        """
        if not self.reuse:
            return
        # Every word of the model's begins with a space.
        farewell = sampling(self._model) | {"messages": [{"role": "user", "content": "."}], "stop": [" "]}
        farewell |= {"stream": False, "min_tokens": 0}
        headers = {"x-conversation-id": conversation}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=farewell, headers=headers) as response:
            outcome = response.headers["x-turnback-reuse"]
            if response.status != 200 or outcome != "diverged":
                raise BenchFailure(f"the end of a conversation came out as {outcome!r}, status {response.status}")

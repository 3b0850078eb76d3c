"""A prefill and a decode simulator, and a proxy in front."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from proxy.settings import Settings
from tests.contract.answers import CHAT, chunks_of, joined, message_of
from tests.running import GENEROUS, Running, running
from tests.simulator import Cluster, SimEngine

Json = dict[str, Any]


@dataclass
class House:
    """One proxy, one prefill, one decode."""

    cluster: Cluster
    prefill: SimEngine
    decode: SimEngine
    proxy: Running

    @property
    def engines(self) -> tuple[SimEngine, SimEngine]:
        """Both."""
        return self.prefill, self.decode

    async def say(self, body: Json, conversation: str = "c", path: str = CHAT) -> Said:
        """Send one turn, streamed or not as ``body`` says, and compare it with what is true.

        Fails if the answer is not, token for token, that of a cold prefill.
        """
        truth = await self.decode.cold_answer(body, path=path)
        headers = {"x-conversation-id": conversation} if conversation else {}
        response = await self.proxy.client.post(path, json=body, headers=headers)
        said = Said(response, path)
        assert response.status_code == 200, response.text
        assert said.message == message_of(truth, path), (said.outcome, said.reason)
        return said

    async def remembers(self, conversation: str) -> bool:
        """Whether the proxy knows of something retained for it."""
        return (await self.proxy.client.get(f"/v1/conversations/{conversation}")).status_code == 200

    async def settled(self) -> None:
        """Wait until neither engine has anything to do, releases included."""
        for engine in self.engines:
            await engine.settle(within=GENEROUS)


@dataclass
class Said:
    """An answer that reached the client."""

    response: httpx.Response
    path: str

    @property
    def outcome(self) -> str:
        """What became of reuse."""
        return self.response.headers["x-turnback-reuse"]

    @property
    def reason(self) -> str:
        """Why."""
        return self.response.headers["x-turnback-reason"]

    @property
    def reused(self) -> int:
        """Tokens."""
        return int(self.response.headers["x-turnback-reused-tokens"])

    @property
    def chunks(self) -> list[Json]:
        """Of a stream: what each event carries, without the end mark."""
        return chunks_of(self.response.text)

    @property
    def message(self) -> Json:
        """What was answered, whether it came whole or in pieces."""
        if self.response.headers["content-type"].startswith("text/event-stream"):
            return joined(self.chunks, self.path)
        return message_of(self.response.json(), self.path)

    @property
    def as_history(self) -> Json:
        """The message as a client sends it back."""
        return {name: value for name, value in self.message.items() if value is not None}


MakeHouse = Callable[..., AbstractAsyncContextManager[House]]


@pytest.fixture
def make_house() -> MakeHouse:
    """Makes a house; ``prefill`` and ``decode`` are options of the simulators, the rest are settings."""

    @contextlib.asynccontextmanager
    async def make(
        *, prefill: Json | None = None, decode: Json | None = None, engines: Json | None = None, **settings: Any
    ) -> AsyncIterator[House]:
        async with Cluster() as cluster:
            p = await cluster.start("p", **{**(engines or {}), **(prefill or {})})
            d = await cluster.start("d", **{**(engines or {}), **(decode or {})})
            chosen = Settings(
                **{
                    "prefill": [p.url],
                    "decode": [d.url],
                    "probe_interval": 0.05,
                    "kv_recompute_threshold": 16,
                    "log_level": "warning",
                    "abandon_grace": 0.2,
                    **settings,
                }
            )
            async with running(chosen, cluster.clock.now) as proxy:
                await proxy.probed()
                # What probing made the engines lease is gone by then.
                cluster.clock.advance(31)
                p.requests.clear()
                d.requests.clear()
                yield House(cluster, p, d, proxy)

    return make


@pytest.fixture
async def house(make_house: MakeHouse) -> AsyncIterator[House]:
    """The usual house."""
    async with make_house(engines={"kv_recompute_threshold": 16}) as made:
        yield made

"""One real prefill and one real decode engine for all end-to-end tests, and proxies in front of them.

Two proxies share the pair: one reuses, one has reuse switched off. Every turn goes to both, so that
what a cold prefill would have answered is known token by token.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from deploy.local.options import EngineOptions
from deploy.local.pair import Pair
from deploy.local.setup import ensure
from proxy.settings import Settings
from tests.e2e.answers import ids_of, prompt_ids_of
from tests.redis_server import RedisServer
from tests.running import Running, running

Json = dict[str, Any]

PATIENCE = 300.0
"""Seconds; a busy machine may take long for what usually takes one."""

DECODER_TTL = 600


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """The engines; built first where they are not."""
    ensure()
    prefill = EngineOptions("prefill")
    decode = EngineOptions("decode", decoder_kv_blocks_ttl=DECODER_TTL)
    with Pair(prefill, decode) as started:
        started.wait_ready()
        yield started


@dataclass
class Turn:
    """The same request, with and without reuse."""

    on: httpx.Response
    off: httpx.Response

    @property
    def outcome(self) -> str:
        """What became of reuse."""
        return self.on.headers["x-turnback-reuse"]

    @property
    def reused(self) -> int:
        """Tokens."""
        return int(self.on.headers["x-turnback-reused-tokens"])


@dataclass
class Proxies:
    """A proxy that reuses, and one that does not, in front of the same engines."""

    on: Running
    off: Running
    held: dict[str, list[int]] = field(default_factory=dict)
    """By conversation: the tokens whose KV decode must still hold after its last turn."""

    async def turn(self, path: str, body: Json, conversation: str) -> Turn:
        """One turn through both; fails unless they answer with the same tokens."""
        asked = {"temperature": 0, "return_token_ids": True, "model": "tiny", **body}
        on = await self.on.client.post(path, json=asked, headers={"x-conversation-id": conversation})
        off = await self.off.client.post(path, json=asked)
        assert on.status_code == 200, on.text
        assert off.status_code == 200, off.text
        assert off.headers["x-turnback-reuse"] == "off"
        assert ids_of(on) == ids_of(off), (on.headers, on.text, off.text)
        assert prompt_ids_of(on) == prompt_ids_of(off)
        return Turn(on, off)

    def expect(self, turn: Turn, conversation: str) -> tuple[str, int]:
        """Outcome and tokens that a turn must have had, from what was held before it; notes what is held now."""
        prompt = prompt_ids_of(turn.on)
        before = self.held.get(conversation)
        self.held[conversation] = (prompt + ids_of(turn.on))[:-1]
        if before is None:
            return "first", 0
        common = 0
        while common < min(len(before), len(prompt)) and before[common] == prompt[common]:
            common += 1
        if common == len(before) < len(prompt):
            return "hit", common
        return ("partial", min(common // 16 * 16, len(prompt) - 1)) if common >= 64 else ("diverged", 0)

    async def turn_as_expected(self, path: str, body: Json, conversation: str) -> Turn:
        """The same as ``turn``; fails unless exactly what could be reused was."""
        turn = await self.turn(path, body, conversation)
        assert (turn.outcome, turn.reused) == self.expect(turn, conversation)
        return turn


def settings(pair: Pair, **more: Any) -> Settings:
    """Of a proxy in front of ``pair``."""
    return Settings(
        **{
            "prefill": [pair.prefill.url],
            "decode": [pair.decode.url],
            "decoder_kv_blocks_ttl": DECODER_TTL,
            "log_level": "warning",
            # Redis may be busy too on a machine of two cores; what is late here would be counted as a failure.
            "store_timeout": 5.0,
            **more,
        }
    )


@contextlib.asynccontextmanager
async def both(pair: Pair, **more: Any) -> AsyncIterator[Proxies]:
    """The two proxies, ready; ``more`` are settings of the one that reuses."""
    async with running(settings(pair, **more)) as on, running(settings(pair, reuse=False)) as off:
        for proxy in (on, off):
            proxy.client.timeout = httpx.Timeout(PATIENCE)
            await proxy.probed()
        yield Proxies(on, off)


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    """URL of a store."""
    if request.param == "memory":
        return "memory://"
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url


@pytest.fixture
async def proxies(pair: Pair, store: str) -> AsyncIterator[Proxies]:
    """The two proxies, by either store."""
    async with both(pair, store=store) as made:
        yield made


@pytest.fixture(params=["whole", "stream"])
def streaming(request: pytest.FixtureRequest) -> Json:
    """Members that ask for a stream, or not."""
    return {"stream": True} if request.param == "stream" else {}

"""Two routers as processes of their own, one of them of several, and traffic that moves every metric there is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.local.ports import free_port
from deploy.local.process import Process
from tests.contract.answers import CHAT, DONE, OPENING, TEXT, chat, chunks_of, joined, message_of, user
from tests.contract.fleet import decodes, prefills, releases, reuses
from tests.redis_server import RedisServer
from tests.running import GENEROUS, eventually
from tests.simulator import Cluster, SimEngine

Json = dict[str, Any]

ADMIN_KEY = "admin"
_GOOD_FOR = 3.0
"""Seconds for which the routers use an entry: real ones, since their processes have no clock that could be moved."""
_MARGIN = 6.0
"""More than the engines', which refuse what is about to expire."""
_PATIENCE = 0.4
"""How long a turn waits for a place."""
_SETTINGS = (
    *("--decoder-kv-blocks-ttl", str(_GOOD_FOR + _MARGIN), "--decoder-kv-blocks-margin", str(_MARGIN)),
    *("--kv-recompute-threshold", "16", "--retained-tokens-budget", "2000", "--retained-watch-interval", "0.3"),
    *("--max-turns-per-worker", "2", "--queue-size", "3", "--queue-timeout", str(_PATIENCE)),
    *("--probe-interval", "0.2", "--health-down-after", "1", "--health-up-after", "1", "--breaker-seconds", "0.5"),
    *("--store-pause", "0.1", "--log-level", "warning", "--secret", "shared", "--admin-key", ADMIN_KEY),
)


@dataclass
class BusyHouse:
    """Routers, workers and the store."""

    prefill: list[SimEngine]
    decode: list[SimEngine]
    redis: RedisServer
    routers: list[str]
    """Their addresses."""
    client: httpx.AsyncClient
    _names: itertools.count[int] = field(default_factory=itertools.count)

    async def up(self) -> bool:
        """Whether all routers have found all workers up."""
        for router in self.routers:
            try:
                ready = (await self.client.get(f"http://{router}/ready")).json()
            except httpx.TransportError:
                return False
            if not all(worker["up"] and worker["probed"] for worker in ready["workers"]):
                return False
        return True

    async def round(self) -> None:
        """A bit of everything. What becomes of the turns is the metrics' business, not ours."""
        async with self._too_late():
            await asyncio.gather(*(self._conversation(stream=stream) for stream in (True, False)), self._text())
            await self._say([user(OPENING)], None)
            await self._other_history()
            await self._over()
            await self._compared()
            await self._failing_legs()
            await self._crowd()
        await self._hoard()
        await self._worker_restarts()
        await self._store_fails()

    async def _say(
        self, messages: list[Json], conversation: str | None, *, stream: bool = True, headers: Json | None = None
    ) -> Json:
        """One turn; its answer as a client sends it back."""
        body = chat(messages, stream=stream)
        response = await self._post(CHAT, body, conversation, headers or {})
        if response.status_code != 200 or (stream and DONE not in response.text):
            return user("Where were we?")
        message = joined(chunks_of(response.text), CHAT) if stream else message_of(response.json(), CHAT)
        return {name: value for name, value in message.items() if value is not None}

    async def _post(self, path: str, body: Json, conversation: str | None, headers: dict[str, str]) -> httpx.Response:
        named = {} if conversation is None else {"x-conversation-id": conversation}
        router = self.routers[next(self._names) % len(self.routers)]
        return await self.client.post(f"http://{router}{path}", json=body, headers=named | headers)

    def _name(self) -> str:
        return f"conversation-{next(self._names)}"

    async def _conversation(self, stream: bool) -> None:
        name, messages = self._name(), [user(OPENING)]
        for _ in range(3):
            answer = await self._say(messages, name, stream=stream)
            messages += [answer, user("Go on.")]

    async def _text(self) -> None:
        name, prompt = self._name(), OPENING
        for _ in range(2):
            body = {"model": "sim-model", "prompt": prompt, "temperature": 0, "max_tokens": 24}
            await self._post(TEXT, body, name, {})
            prompt += " And then?"

    @contextlib.asynccontextmanager
    async def _too_late(self) -> AsyncIterator[None]:
        """A conversation that begins before the block, and goes on after it, when its time is over."""
        name, messages = self._name(), [user(OPENING)]
        answer = await self._say(messages, name)
        over = time.monotonic() + _GOOD_FOR
        yield
        await eventually(lambda: time.monotonic() > over)
        await self._say([*messages, answer, user("Are you there?")], name)

    async def _other_history(self) -> None:
        name = self._name()
        await self._say([user(OPENING)], name)
        await self._say([user("Something else altogether, from its first word on: " + OPENING)], name)

    async def _over(self) -> None:
        """Two are deleted. The blocks of one, or of another that is given up, cannot be given back."""
        for engine in self.prefill:
            engine.fail_next(when=releases, status=400)
        for _ in range(2):
            name = self._name()
            await self._say([user(OPENING)], name)
            await self.client.delete(f"http://{self.routers[0]}/v1/conversations/{name}", params={"model": "sim-model"})

    async def _compared(self) -> None:
        """A conversation whose turns are to be served without reuse."""
        headers = {"x-turnback-reuse": "off", "x-turnback-admin-key": ADMIN_KEY}
        name, messages = self._name(), [user(OPENING)]
        for _ in range(2):
            answer = await self._say(messages, name, headers=headers)
            messages += [answer, user("Go on.")]

    async def _failing_legs(self) -> None:
        for when, engines in ((reuses, self.prefill), (prefills, self.prefill), (decodes, self.decode)):
            for engine in engines:
                engine.fail_next(when=when)
            await self._conversation(stream=True)

    async def _crowd(self) -> None:
        """More turns at once than there are places, and than may wait."""
        await asyncio.gather(*(self._say([user(f"{at}. {OPENING}")], None) for at in range(48)))

    async def _hoard(self) -> None:
        """More than may be retained, whichever workers it goes to."""
        names = [self._name() for _ in range(8)]
        await asyncio.gather(*(self._say([user(12 * OPENING)], name) for name in names))
        await asyncio.gather(*(self._say([user(12 * OPENING + "Go on.")], name) for name in names))

    async def _worker_restarts(self) -> None:
        last = self.decode[-1]
        await last.stop()
        await eventually(self._seen_down)
        await self._conversation(stream=True)
        await last.start()
        await eventually(self.up)

    async def _seen_down(self) -> bool:
        return not await self.up()

    async def _store_fails(self) -> None:
        self.redis.stop()
        await self._conversation(stream=True)
        self.redis.start()


@contextlib.asynccontextmanager
async def busy_house(redis: RedisServer) -> AsyncIterator[BusyHouse]:
    """Everything up. The last decode worker does not say at the end of a stream what it holds."""
    async with contextlib.AsyncExitStack() as ending:
        cluster = await ending.enter_async_context(Cluster())
        options: dict[str, Any] = {
            "kv_recompute_threshold": 16,
            "decoder_kv_blocks_ttl": _GOOD_FOR + _MARGIN,
            "num_blocks": 4096,
            "prefix_caching": False,
            "prefill_seconds_per_token": 0.0002,
            "decode_seconds_per_token": 0.002,
        }
        prefill = [await cluster.start(f"p{number}", **options) for number in range(2)]
        decode = [await cluster.start(f"d{number}", **options) for number in range(2)]
        decode.append(await cluster.start("d2", **options, streams_carry_kv_params=False))
        workers = [
            f"--{role}={one.url}" for role, several in (("prefill", prefill), ("decode", decode)) for one in several
        ]
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="turnback-busy-")))
        routers = []
        for processes in (2, 1):
            port = free_port()
            routers.append(f"127.0.0.1:{port}")
            command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port), "--workers", str(processes)]
            router = Process(
                "router",
                [*command, "--store", redis.url, *workers, *_SETTINGS],
                log=folder / f"router-{port}.log",
                env={name: value for name, value in os.environ.items() if not name.startswith("TURNBACK_")},
            )
            ending.callback(router.stop)
        client = await ending.enter_async_context(httpx.AsyncClient(timeout=GENEROUS))
        house = BusyHouse(prefill, decode, redis, routers, client)
        await eventually(house.up)
        yield house

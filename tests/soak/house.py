"""Three prefill and three decode simulators, Redis, and two proxies as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.local.ports import free_port
from metadata_store import open_store
from tests.contract.fleet import TTL
from tests.redis_server import RedisServer
from tests.running import GENEROUS, eventually
from tests.simulator import Cluster, SimEngine

EACH = 3
PROXIES = 2
# Time-outs are generous beside what a simulator takes, and short beside a soak that makes workers hang.
SETTINGS = (
    *("--kv-recompute-threshold", "16", "--probe-interval", "0.2", "--probe-timeout", "5", "--log-level", "warning"),
    *("--prefill-timeout", "4", "--first-byte-timeout", "4", "--gap-timeout", "4", "--render-timeout", "4"),
    *("--store-timeout", "2", "--store-pause", "0.2", "--abandon-grace", "0.3", "--retained-watch-interval", "1"),
    *("--breaker-seconds", "1"),
)


@dataclass
class House:
    """All that a soak runs against."""

    cluster: Cluster
    prefill: list[SimEngine]
    decode: list[SimEngine]
    redis: RedisServer
    proxies: list[str]
    """Their URLs."""
    logs: list[Path]
    client: aiohttp.ClientSession

    @property
    def engines(self) -> list[SimEngine]:
        """All."""
        return [*self.prefill, *self.decode]

    async def get(self, url: str) -> tuple[int, str]:
        """Status and text; status 0 if nobody answers."""
        try:
            async with self.client.get(url) as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def up(self) -> bool:
        """Whether both proxies have found all workers up and out what they can do."""
        for proxy in self.proxies:
            status, text = await self.get(f"{proxy}/ready")
            if status != 200 or not all(w["up"] and w["probed"] for w in json.loads(text)["workers"]):
                return False
        return True

    async def at_rest(self) -> bool:
        """Whether neither proxy has anything to do for a turn."""
        return not await self.at_work()

    async def at_work(self) -> list[str]:
        """What the proxies still do."""
        found = []
        for proxy in self.proxies:
            _, ready = await self.get(f"{proxy}/ready")
            _, metrics = await self.get(f"{proxy}/metrics")
            workers = json.loads(ready)["workers"]
            found += [f"{proxy}: {one['in_flight']} legs on {one['worker']}" for one in workers if one["in_flight"]]
            counts = ("turnback_turns_running", "turnback_turns_queued")
            found += [line for line in metrics.splitlines() if line.startswith(counts) and not line.endswith(" 0.0")]
        return found

    async def entries(self) -> Counter[tuple[str, int]]:
        """Worker and blocks of everything in the store."""
        store = open_store(self.redis.url, timeout=GENEROUS)
        try:
            return Counter([(holding.worker, holding.blocks) async for _, holding in store.scan()])
        finally:
            await store.close()

    def complaints(self) -> list[str]:
        """Lines of the proxies' logs that tell of a fault in the proxy itself."""
        return [
            line
            for log in self.logs
            for line in log.read_text(errors="replace").splitlines()
            if "Traceback" in line or "[error" in line
        ]


@contextlib.asynccontextmanager
async def house() -> AsyncIterator[House]:
    """Everything up and probed."""
    # The simulators' server tells of each connection that a fault, or a client, has cut.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    async with contextlib.AsyncExitStack() as ending:
        redis = RedisServer()
        ending.callback(redis.close)
        redis.start()
        cluster = await ending.enter_async_context(Cluster())
        options: dict[str, Any] = {"kv_recompute_threshold": 16, "num_blocks": 4096, "decoder_kv_blocks_ttl": TTL - 1}
        prefill = [await cluster.start(f"p{number}", **options) for number in range(EACH)]
        decode = [await cluster.start(f"d{number}", **options) for number in range(EACH)]
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="turnback-soak-")))
        workers = [
            f"--{role}={one.url}" for role, several in (("prefill", prefill), ("decode", decode)) for one in several
        ]
        proxies, logs = [], []
        for number in range(PROXIES):
            proxies.append(f"http://127.0.0.1:{(port := free_port())}")
            logs.append(folder / f"proxy-{number}.log")
            log = ending.enter_context(logs[-1].open("wb"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy.cli", "serve", "--port", str(port), "--store", redis.url),
                *(*workers, *SETTINGS),
                env={name: value for name, value in os.environ.items() if not name.startswith("TURNBACK_")},
                stdout=log,
                stderr=log,
            )
            ending.push_async_callback(_end, process)
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        client = await ending.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        made = House(cluster, prefill, decode, redis, proxies, logs, client)
        await eventually(made.up)
        yield made


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()

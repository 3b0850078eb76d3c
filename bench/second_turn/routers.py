"""Routers, each a process of its own, started as users start one."""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp

from bench.failure import BenchFailure
from deploy.local.layout import PROJECT, Layout
from deploy.local.pair import Pair
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.process import Process

READY_SECONDS = 120.0
LOOK_SECONDS = 0.2


class Router:
    """`turnback serve` in front of a pair, with `arguments` besides the workers."""

    def __init__(self, name: str, pair: Pair, *arguments: str) -> None:
        """Start it."""
        port = free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port)]
        command += ["--prefill", pair.prefill.url, "--decode", pair.decode.url, *arguments]
        log = Layout.default().logs / f"bench-{name}.log"
        log.unlink(missing_ok=True)
        self._process = Process(name, command, log=log, cwd=PROJECT)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Return when it knows what both workers can do. Raises ``BenchFailure``."""
        deadline = time.monotonic() + READY_SECONDS
        while not await self._knows_workers(session):
            if self._process.exit_code is not None or time.monotonic() > deadline:
                raise BenchFailure(f"a router did not become ready; its log: {self._process.log}")
            await asyncio.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    async def _knows_workers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/ready") as response:
                workers = (await response.json())["workers"]
        except aiohttp.ClientConnectionError:
            return False
        return all(worker["up"] and worker["probed"] for worker in workers)

"""A proxy running in the test's own event loop, on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from proxy.app import create_app
from proxy.settings import Settings

GENEROUS = 30.0
"""Seconds to wait for what should take a moment."""


@dataclass
class Running:
    """A proxy under test."""

    url: str
    client: httpx.AsyncClient
    settings: Settings

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """POST ``body`` as JSON; header names with underscores for dashes."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=sent)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples called ``name`` that have ``labels``."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.client.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def probed(self) -> None:
        """Wait until all workers are up and it is known what they can do."""
        await eventually(self._all_probed)

    async def _all_probed(self) -> bool:
        workers = (await self.client.get("/ready")).json()["workers"]
        return all(worker["up"] and worker["probed"] for worker in workers)


async def eventually(holds: Callable[[], Any], within: float = GENEROUS) -> None:
    """Wait until ``holds()`` (or what it awaits) is true; ``AssertionError`` if it is not in time."""
    end = time.monotonic() + within
    while True:
        result = holds()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert time.monotonic() < end, f"{holds} did not come true within {within} s"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(settings: Settings, clock: Callable[[], float] = time.time) -> AsyncIterator[Running]:
    """The proxy, listening; its workers need not be."""
    config = uvicorn.Config(create_app(settings, clock), port=0, log_config=None, access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with contextlib.closing(config.bind_socket()) as listening:
        serving = asyncio.create_task(server._serve([listening]))
        try:
            await eventually(lambda: server.started or serving.done())
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=GENEROUS) as client:
                yield Running(url, client, settings)
        finally:
            server.should_exit = True
            await serving

"""A prefill and a decode simulator, and a proxy in front."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.settings import Settings
from tests.running import Running, running
from tests.simulator import Cluster, SimEngine

Json = dict[str, Any]


@dataclass
class House:
    """One proxy, one prefill, one decode."""

    cluster: Cluster
    prefill: SimEngine
    decode: SimEngine
    proxy: Running


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
                    **settings,
                }
            )
            async with running(chosen) as proxy:
                await proxy.probed()
                p.requests.clear()
                d.requests.clear()
                yield House(cluster, p, d, proxy)

    return make


@pytest.fixture
async def house(make_house: MakeHouse) -> AsyncIterator[House]:
    """The usual house."""
    async with make_house(engines={"kv_recompute_threshold": 16}) as made:
        yield made

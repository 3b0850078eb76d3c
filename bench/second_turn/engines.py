"""What the engines' metrics tell a bench, and when decode is at rest."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.failure import BenchFailure

AT_REST_SECONDS = 60.0
LOOK_SECONDS = 0.2

USAGE = "vllm:kv_cache_usage_perc"
READ_FROM_OTHERS = "vllm:external_prefix_cache_hits_total"
CACHE_CONFIG = "vllm:cache_config_info"


async def metric(session: aiohttp.ClientSession, engine: str, name: str) -> float:
    """The value of metric ``name``. Raises ``BenchFailure`` if there is none."""
    return (await _sample(session, engine, name))[1]


async def block_size(session: aiohttp.ClientSession, engine: str) -> int:
    """Tokens per KV block."""
    return int((await _sample(session, engine, CACHE_CONFIG))[0]["block_size"])


async def at_rest(session: aiohttp.ClientSession, decode: str) -> None:
    """Wait until ``decode`` retains nothing. Raises ``BenchFailure`` if it goes on to.

    An engine that retains blocks keeps a core busy, and there may be few. Prefill is not waited for:
    the request by which decode was told to free leaves a block there for `kv_lease_duration`, 30 s,
    after every conversation of every arm.
    """
    deadline = time.monotonic() + AT_REST_SECONDS
    while (usage := await metric(session, decode, USAGE)) > 0:
        if time.monotonic() > deadline:
            raise BenchFailure(f"{decode} still holds {usage:.1%} of its KV cache after {AT_REST_SECONDS:.0f} s")
        await asyncio.sleep(LOOK_SECONDS)


async def _sample(session: aiohttp.ClientSession, engine: str, name: str) -> tuple[dict[str, str], float]:
    async with session.get(f"{engine}/metrics") as response:
        text = await response.text()
    # Of thousands of lines, one is parsed: this runs between measurements, on the same cores.
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(name))
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if sample.name == name:
                return sample.labels, sample.value
    raise BenchFailure(f"{engine} has no metric {name}")

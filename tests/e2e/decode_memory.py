"""What a real decode engine holds, as its own metrics tell."""

from __future__ import annotations

import httpx

from deploy.local.pair import Engine
from proxy.vitals import vitals


async def held_blocks(engine: Engine) -> int:
    """KV blocks in use."""
    async with httpx.AsyncClient(timeout=60) as client:
        seen = vitals((await client.get(f"{engine.url}/metrics")).text)
    assert seen.num_blocks is not None
    assert seen.kv_usage is not None
    return round(seen.kv_usage * seen.num_blocks)

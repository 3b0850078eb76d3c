"""What a Turnback router says of itself while the bench runs: counters, and what decode holds."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from bench.failure import BenchFailure
from bench.multiturn.client import Client
from bench.result import Retained

PROMPT_TOKENS = "turnback_prompt_tokens_total"
CAPACITY = "turnback_worker_kv_capacity_tokens"
_GAUGES = {
    "turnback_retained_entries": "entries",
    "turnback_retained_tokens": "tokens",
    "turnback_retained_share": "share",
}


@dataclass(frozen=True, slots=True)
class Look:
    """One look at ``/metrics``."""

    prompt_tokens: dict[str, float] = field(default_factory=dict)
    """By fate, since the router started."""
    retained: tuple[Retained, ...] = ()
    capacity: dict[str, int] = field(default_factory=dict)
    """Tokens of KV cache by decode worker."""


def look_at(text: str, at_seconds: float) -> Look:
    """What ``text``, an exposition, says. Raises ``ValueError`` if it is none."""
    fates: defaultdict[str, float] = defaultdict(float)
    held: defaultdict[str, dict[str, float]] = defaultdict(dict)
    capacity: dict[str, int] = {}
    # Of thousands of lines a dozen are parsed: this runs beside what is measured.
    wanted = (PROMPT_TOKENS, CAPACITY, *_GAUGES)
    kept = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(wanted))
    for family in text_string_to_metric_families(kept):
        for sample in family.samples:
            worker = sample.labels.get("worker", "")
            if sample.name == PROMPT_TOKENS:
                fates[sample.labels.get("fate", "")] += sample.value
            elif sample.name == CAPACITY and sample.labels.get("role") == "decode" and sample.value > 0:
                capacity[worker] = int(sample.value)
            elif sample.name in _GAUGES:
                held[worker][_GAUGES[sample.name]] = sample.value
    retained = tuple(
        Retained(
            at_seconds=at_seconds,
            worker=worker,
            entries=int(values["entries"]) if "entries" in values else None,
            tokens=int(values["tokens"]) if "tokens" in values else None,
            share=values.get("share"),
        )
        for worker, values in sorted(held.items())
    )
    return Look(dict(fates), retained, capacity)


class Watch:
    """Looks at a router every so often, from ``start`` to ``stop``. Of another server it sees nothing."""

    def __init__(self, client: Client, began: float, interval: float) -> None:
        """``began`` is when the run did, by ``time.perf_counter``."""
        self._client = client
        self._began = began
        self._interval = interval
        self._looking: asyncio.Task[None] | None = None
        self.retained: list[Retained] = []
        self.capacity: dict[str, int] = {}

    async def look(self) -> Look:
        """One look now; empty if there is nothing to see."""
        try:
            status, text = await self._client.get("/metrics")
            found = look_at(text, time.perf_counter() - self._began) if status == 200 else Look()
        except (BenchFailure, ValueError):
            return Look()
        self.retained += found.retained
        self.capacity |= found.capacity
        return found

    def start(self) -> None:
        """Begin to look."""
        self._looking = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """End it."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

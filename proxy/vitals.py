"""How a worker is, read from its ``/metrics``."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from router.workers import UNKNOWN_GENERATION

_START = "process_start_time_seconds"
_CACHE = "vllm:cache_config_info"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"
_WANTED = tuple(f"{name}{follows}" for name in (_START, _CACHE, _RUNNING, _WAITING, _USAGE) for follows in " {")


@dataclass(frozen=True)
class Vitals:
    """Which start of the worker this is, its KV cache, and its load."""

    generation: str
    """``UNKNOWN_GENERATION`` if it does not tell when it started."""
    block_size: int | None = None
    """Tokens."""
    num_blocks: int | None = None
    running: int | None = None
    """Requests that are computed."""
    waiting: int | None = None
    """Requests in the queue."""
    kv_usage: float | None = None
    """Share of the blocks in use, 0 to 1."""


class Exposition:
    """What a server shows, of which each of its engines (data-parallel ranks) has a part."""

    def __init__(self, metrics: str) -> None:
        # Only the lines that are wanted are parsed: vLLM has thousands, and this is read every few seconds.
        lines = "\n".join(line for line in metrics.splitlines() if line.startswith(_WANTED))
        self._samples = [sample for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]

    def of(self, rank: int | None) -> Vitals:
        """Of the engine with this rank; without one, of all engines together."""
        # The cache's shape is the same for all: a version that labels no engine tells it too.
        caches = [labels for labels, _ in self._of(_CACHE, rank)] or [labels for labels, _ in self._of(_CACHE, None)]
        cache = caches[0] if caches else {}
        # What each engine shows as its blocks is the sum over all of them.
        blocks = _positive(cache.get("num_gpu_blocks"))
        if blocks is not None and rank is not None:
            blocks //= len({labels.get("engine") for labels, _ in self._of(_CACHE, None)})
        usages = [value for _, value in self._of(_USAGE, rank) if math.isfinite(value)]
        return Vitals(
            generation=next((repr(value) for _, value in self._of(_START, None)), UNKNOWN_GENERATION),
            block_size=_positive(cache.get("block_size")),
            num_blocks=blocks,
            running=_sum(value for _, value in self._of(_RUNNING, rank)),
            waiting=_sum(value for _, value in self._of(_WAITING, rank)),
            kv_usage=sum(usages) / len(usages) if usages else None,
        )

    def _of(self, name: str, rank: int | None) -> list[tuple[dict[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for sample in self._samples
            if sample.name == name and (rank is None or sample.labels.get("engine") == str(rank))
        ]


def vitals(metrics: str, rank: int | None = None) -> Vitals:
    """Read from a worker's ``/metrics``; of one rank, or of all it has."""
    return Exposition(metrics).of(rank)


def _sum(values: Iterable[float]) -> int | None:
    counted = [int(value) for value in values if math.isfinite(value)]
    return sum(counted) if counted else None


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None

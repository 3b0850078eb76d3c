"""Evidence from the metrics of running routers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.advise.evidence import Cell, Evidence, Held, OutcomeCount, Point, Told, leaves_entry
from bench.advise.spread import Spread
from bench.failure import BenchFailure
from proxy.telemetry import CONTEXTS


@dataclass(frozen=True)
class Scrape:
    """What one router's ``/metrics`` said."""

    origin: str
    text: str
    at: float | None = None
    """Seconds since the epoch; None if nobody knows when."""


def from_metrics(scrapes: Sequence[Scrape], source: str) -> Evidence:
    """What the routers saw since they were started, all together.

    Raises ``BenchFailure``, naming the origin, for what is not the metrics of Turnback.
    """
    routers = [_parsed(scrape) for scrape in scrapes]
    every = _Samples([sample for router in routers for sample in router])
    outcomes = tuple(
        OutcomeCount(outcome, reason, round(count))
        for (outcome, reason), count in every.totals("turnback_turns_total", "outcome", "reason").items()
        if count
    )
    rates = [_rate(_Samples(router), scrape.at) for router, scrape in zip(routers, scrapes, strict=True)]
    held = _held(every)
    prompts = every.total("turnback_prompt_tokens_total")
    recomputed = every.total("turnback_prompt_tokens_total", fate="recomputed")
    renders = every.total("turnback_render_seconds_count")
    return Evidence(
        source=source,
        kind="router",
        outcomes=outcomes,
        pauses=every.histogram("turnback_pause_seconds"),
        turns_per_second=sum(rate for rate in rates if rate is not None) if None not in rates else None,
        tokens_per_entry=held.tokens / held.entries if held and held.entries else _mean_tokens(every),
        capacity_tokens=round(sum(every.most("turnback_worker_kv_capacity_tokens", role="decode").values())) or None,
        held=held,
        points=tuple(_points(every)),
        cells=tuple(_cells(every)),
        renders=round(renders),
        render_seconds=every.total("turnback_render_seconds_sum") / renders if renders else 0.0,
        told=_told(every),
        recomputed_share=recomputed / prompts if prompts else None,
    )


def _parsed(scrape: Scrape) -> list[Sample]:
    try:
        families: Iterable[Metric] = list(text_string_to_metric_families(scrape.text))
    except (ValueError, KeyError, IndexError) as error:
        raise BenchFailure(f"{scrape.origin}: not in Prometheus's text format: {error}") from error
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("turnback_")]
    if not samples:
        raise BenchFailure(f"{scrape.origin}: no metrics of Turnback there")
    return samples


class _Samples:
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            self._by_name[sample.name].append(sample)

    def of(self, name: str, **labels: str) -> list[Sample]:
        return [sample for sample in self._by_name[name] if labels.items() <= sample.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.of(name, **labels))

    def values(self, name: str) -> list[float]:
        """The different ones, in order."""
        return sorted({sample.value for sample in self.of(name)})

    def totals(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Sums by the values of the labels ``by``."""
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for sample in self.of(name):
            found[tuple(sample.labels.get(label, "") for label in by)] += sample.value
        return found

    def most(self, name: str, **labels: str) -> dict[str, float]:
        """By worker, the largest value that a router tells: each tells of what all of them left there."""
        found: dict[str, float] = {}
        for sample in self.of(name, **labels):
            worker = sample.labels.get("worker", "")
            found[worker] = max(sample.value, found.get(worker, 0.0))
        return found

    def histogram(self, name: str, **labels: str) -> Spread:
        up_to: dict[float, float] = defaultdict(float)
        for sample in self.of(f"{name}_bucket", **labels):
            up_to[float(sample.labels["le"])] += sample.value
        return Spread.of_buckets(up_to)


def _rate(router: _Samples, at: float | None) -> float | None:
    """Turns a second that leave an entry, since the first one came.

    None if the router does not tell when that was; several processes do not.
    """
    begins = [sample.value for sample in router.of("turnback_turns_created")]
    if at is None or not begins or at <= min(begins):
        return None
    ended = router.totals("turnback_turns_total", "outcome", "reason").items()
    left = sum(turns for (outcome, reason), turns in ended if leaves_entry(outcome, reason))
    return left / (at - min(begins))


def _held(every: _Samples) -> Held | None:
    tokens = every.most("turnback_retained_tokens")
    if not tokens:
        return None
    shares = every.most("turnback_retained_share")
    return Held(
        entries=sum(every.most("turnback_retained_entries").values()),
        tokens=sum(tokens.values()),
        share=max(shares.values(), default=None),
    )


def _told(every: _Samples) -> Told:
    """Nothing by routers that are older than these metrics."""
    return Told(
        ttl=tuple(every.values("turnback_decoder_kv_blocks_ttl_seconds")),
        threshold=tuple(round(value) for value in every.values("turnback_kv_recompute_threshold_tokens")),
        retained_share=tuple(every.values("turnback_retained_share_bound")),
    )


def _mean_tokens(every: _Samples) -> float | None:
    """Of prompt and answer, of all turns."""
    turns = every.total("turnback_turns_total")
    prompts = every.total("turnback_prompt_tokens_total")
    return (prompts + every.total("turnback_output_tokens_total")) / turns if turns and prompts else None


def _points(every: _Samples) -> Iterable[Point]:
    for context in CONTEXTS:
        for reused in ("yes", "no"):
            labels = {"context": context, "reused": reused}
            legs = round(every.total("turnback_prefill_seconds_count", **labels))
            if not legs:
                continue
            mean = every.total("turnback_prefill_seconds_sum", **labels) / legs
            yield Point(
                computed=every.total("turnback_prefill_tokens_total", kind="computed", **labels) / legs,
                copied=every.total("turnback_prefill_tokens_total", kind="copied", **labels) / legs,
                seconds=mean,
                count=legs,
                variance=every.histogram("turnback_prefill_seconds", **labels).variance(mean),
            )


def _cells(every: _Samples) -> Iterable[Cell]:
    for context in CONTEXTS:
        for reused in ("yes", "no"):
            labels = {"context": context, "reused": reused}
            count = round(every.total("turnback_context_ttft_seconds_count", **labels))
            if not count:
                continue
            mean = every.total("turnback_context_ttft_seconds_sum", **labels) / count
            spread = every.histogram("turnback_context_ttft_seconds", **labels)
            yield Cell(context, reused == "yes", count, mean, spread.variance(mean))

"""A router's metrics become the same evidence."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bench.advise.evidence import OutcomeCount, Told
from bench.advise.from_metrics import Scrape, from_metrics
from bench.failure import BenchFailure

LATER = 2e9
"""Seconds since the epoch; long after these tests."""


def router(*, turns: int = 40, returns: int = 0, created: bool = True) -> str:
    """What a router shows after some turns: made by the same library, so by the same rules."""
    registry = CollectorRegistry()
    ended = Counter("turnback_turns", "", ("endpoint", "outcome", "reason"), registry=registry)
    ended.labels("chat", "hit", "all_held").inc(turns)
    ended.labels("completions", "hit", "all_held").inc(5)
    ended.labels("chat", "none", "no_id").inc(3)
    ended.labels("chat", "off", "reuse_off").inc(7)
    pauses = Histogram("turnback_pause_seconds", "", (), buckets=(1, 10, 60), registry=registry)
    for pause in (0.5, 5, 5, 30, 300, *[30] * returns):
        pauses.observe(pause)
    first = Histogram("turnback_context_ttft_seconds", "", ("context", "reused"), buckets=(0.1, 1), registry=registry)
    for seconds in (0.2, 0.4):
        first.labels("2k-4k", "yes").observe(seconds)
    first.labels("2k-4k", "no").observe(0.8)
    legs = Histogram("turnback_prefill_seconds", "", ("context", "reused"), buckets=(0.1, 1), registry=registry)
    tokens = Counter("turnback_prefill_tokens", "", ("context", "reused", "kind"), registry=registry)
    for computed, copied, seconds in ((300, 2500, 0.2), (500, 3100, 0.4)):
        legs.labels("2k-4k", "yes").observe(seconds)
        tokens.labels("2k-4k", "yes", "computed").inc(computed)
        tokens.labels("2k-4k", "yes", "copied").inc(copied)
    legs.labels("<=1k", "no").observe(0.05)
    tokens.labels("<=1k", "no", "computed").inc(600)
    fates = Counter("turnback_prompt_tokens", "", ("fate",), registry=registry)
    fates.labels("recomputed").inc(25)
    fates.labels("new").inc(75)
    renders = Histogram("turnback_render_seconds", "", (), buckets=(0.01,), registry=registry)
    renders.observe(0.004)
    renders.observe(0.008)
    for name, value in (("entries", 4), ("tokens", 10_000), ("share", 0.25)):
        Gauge(f"turnback_retained_{name}", "", ("worker",), registry=registry).labels("http://d:1").set(value)
    capacity = Gauge("turnback_worker_kv_capacity_tokens", "", ("role", "worker"), registry=registry)
    capacity.labels("decode", "http://d:1").set(40_000)
    capacity.labels("prefill", "http://p:1").set(90_000)
    text = generate_latest(registry).decode()
    return text if created else "\n".join(line for line in text.splitlines() if "_created" not in line) + "\n"


def test_all_that_a_router_tells() -> None:
    seen = from_metrics([Scrape("http://r:1", router())], "r")
    assert set(seen.outcomes) == {
        OutcomeCount("hit", "all_held", 45), OutcomeCount("none", "no_id", 3), OutcomeCount("off", "reuse_off", 7),
    }  # fmt: skip
    # Those with reuse off were not allowed to reuse, but their conversations go on as others do.
    assert (seen.turns, seen.entries_left) == (48, 52)
    assert seen.recomputed_share == pytest.approx(0.25)
    assert (seen.pauses.count, seen.pauses.beyond, seen.pauses.longest) == (5, 1, 60)
    assert seen.pauses.share_up_to(10) == pytest.approx(0.6)
    assert seen.capacity_tokens == 40_000
    assert seen.held is not None
    assert (seen.held.entries, seen.held.tokens, seen.held.share) == (4, 10_000, 0.25)
    assert seen.tokens_per_entry == 2500
    assert seen.renders == 2
    assert seen.render_seconds == pytest.approx(0.006)
    cells = {(cell.context, cell.reused, cell.count): cell.mean for cell in seen.cells}
    assert cells == {("2k-4k", True, 2): pytest.approx(0.3), ("2k-4k", False, 1): pytest.approx(0.8)}
    points = {(point.computed, point.copied, point.count): point.seconds for point in seen.points}
    assert points == {(400, 2800, 2): pytest.approx(0.3), (600, 0, 1): pytest.approx(0.05)}


def set_to(ttl: float, threshold: int, share: float) -> str:
    """What a router tells of its settings."""
    return (
        f"turnback_decoder_kv_blocks_ttl_seconds {ttl}\n"
        f"turnback_kv_recompute_threshold_tokens {float(threshold)}\n"
        f"turnback_retained_share_bound {share}\n"
    )


def test_settings_are_told_each_value_once() -> None:
    routers = [Scrape("r", router() + set_to(*told)) for told in ((480, 64, 0.5), (240, 64, 0.4), (480, 64, 0.5))]
    assert from_metrics(routers, "r").told == Told((240, 480), (64,), (0.4, 0.5))
    older = Scrape("old", router())
    assert from_metrics([older, routers[0]], "r").told == Told((480,), (64,), (0.5,))
    assert from_metrics([older], "r").told == Told()


def test_turns_a_second_are_known_where_the_first_turns_time_is() -> None:
    begun = next(float(line.split()[-1]) for line in router().splitlines() if line.startswith("turnback_turns_created"))
    assert from_metrics([Scrape("r", router(), begun + 100)], "r").turns_per_second == pytest.approx(0.52, rel=0.05)
    assert from_metrics([Scrape("r", router())], "r").turns_per_second is None
    assert from_metrics([Scrape("r", router(created=False), LATER)], "r").turns_per_second is None


def test_routers_add_up_but_what_decode_holds_is_told_by_each() -> None:
    seen = from_metrics([Scrape("a", router(turns=10)), Scrape("b", router(turns=20))], "both")
    assert seen.turns_with(["hit"]) == 40
    assert seen.pauses.count == 10
    assert seen.capacity_tokens == 40_000
    assert seen.held is not None
    assert seen.held.tokens == 10_000


@pytest.mark.parametrize(
    "text", ["", "<html>not found</html>", "up 1\n", "turnback_turns_total{", "turnback_turns_total one\n", "{}"]
)
def test_what_is_not_a_routers_metrics_is_named(text: str) -> None:
    with pytest.raises(BenchFailure, match="http://r:1"):
        from_metrics([Scrape("http://r:1", text)], "r")

"""TTLs for pauses whose best answer is known, and the memory they hold, by hand."""

from __future__ import annotations

import pytest

from bench.advise.evidence import Current, Held, OutcomeCount
from bench.advise.spread import Spread
from bench.advise.ttl import CANDIDATES, advise_ttl, held_seconds, held_tokens
from tests.unit.advise_cases import evidence, returns

NOW = Current()
HALF = [10.0] * 50 + [1000.0] * 50


def test_half_come_soon_and_half_late_and_memory_does_not_matter() -> None:
    advice = advise_ttl(returns(*HALF), NOW)
    # The shortest that is, less the margin of 10 s, above 1000 s.
    assert advice.recommended == 1200
    kept = {choice.ttl: choice.kept for choice in advice.choices}
    assert (kept[15], kept[20], kept[900], kept[1200]) == (0, 0.5, 0.5, 1)
    assert advice.now.kept == 0.5


def test_half_come_soon_and_half_late_and_memory_is_short() -> None:
    # 1200 s would hold 0.5 * 10 + 0.5 * 1000 = 505 s of 1 turn/s and 100 tokens: half of 100,000 tokens, and 5 % more.
    advice = advise_ttl(returns(*HALF, turns_per_second=1, tokens_per_entry=100, capacity_tokens=100_000), NOW)
    # As many are kept by 20 s as by any that fits.
    assert (advice.recommended, advice.best_without_bound, advice.fits) == (20, 1200, True)
    assert advice.kept_low < 0.5 < advice.kept_high
    more = advise_ttl(returns(*HALF, turns_per_second=1, tokens_per_entry=100, capacity_tokens=102_000), NOW)
    assert more.recommended == 1200


def test_pauses_that_the_margin_uses_up_are_not_kept() -> None:
    assert advise_ttl(returns(*[21.0] * 30), NOW).recommended == 45
    assert advise_ttl(returns(*[20.0] * 30), NOW).recommended == 30


def test_memory_by_hand() -> None:
    """40 turns left an entry, 30 were returned to: after 10 s (20 of them) and after 100 s (10)."""
    seen = returns(*[10.0] * 20, *[100.0] * 10, turns=40, turns_per_second=2.0, tokens_per_entry=8000)
    # 50 s: 20 hold it for 10 s, 10 for 50 s, and the 10 that nobody came back to for 50 s.
    assert held_seconds(50, seen) == pytest.approx((20 * 10 + 10 * 50 + 10 * 50) / 40)
    assert held_tokens(50, seen, NOW) == pytest.approx(2 * 30 * 8000)
    assert held_tokens(480, seen, NOW) == pytest.approx(2 * 8000 * (20 * 10 + 10 * 100 + 10 * 480) / 40)


def test_the_example_of_the_readme() -> None:
    """One turn in two seconds, none of which goes on, 480 s and 8,000 tokens are 1.9 million tokens."""
    seen = evidence(
        outcomes=(OutcomeCount("first", "nothing_stored", 100),), turns_per_second=0.5, tokens_per_entry=8000
    )
    assert held_tokens(480, seen, NOW) == pytest.approx(1.92e6)


def test_memory_without_a_rate_is_reckoned_from_what_is_held_now() -> None:
    seen = returns(*[100.0] * 30, held=Held(entries=10, tokens=50_000, share=0.1))
    assert held_tokens(480, seen, NOW) == pytest.approx(50_000)
    assert held_tokens(50, seen, NOW) == pytest.approx(25_000)


def test_memory_is_unknown_where_nothing_tells() -> None:
    advice = advise_ttl(returns(*HALF), NOW)
    assert {choice.tokens for choice in advice.choices} == {None}
    assert advice.fits


def test_where_nothing_fits_the_shortest_is_named_and_said_not_to_fit() -> None:
    advice = advise_ttl(returns(*HALF, turns_per_second=1, tokens_per_entry=100, capacity_tokens=10), NOW)
    assert (advice.recommended, advice.fits) == (CANDIDATES[0], False)


def test_little_data_gives_no_number() -> None:
    advice = advise_ttl(returns(*[10.0] * 19), NOW)
    assert (advice.recommended, advice.returns) == (None, 19)
    assert advise_ttl(evidence(), NOW).recommended is None


def test_pauses_beyond_an_hour_give_no_number() -> None:
    assert advise_ttl(returns(*[7200.0] * 100), NOW).recommended is None


def test_histograms_serve_as_well_as_single_pauses() -> None:
    """All between 30 and 60 s, of which only the bounds are known."""
    pauses = Spread.of_buckets({30.0: 0, 60.0: 100, 120.0: 100, float("inf"): 100})
    advice = advise_ttl(evidence(pauses=pauses, outcomes=(OutcomeCount("hit", "all_held", 100),)), NOW)
    # 60 s keeps those up to 50 s, two thirds; 90 s keeps all.
    assert advice.recommended == 90
    assert {choice.ttl: choice.kept for choice in advice.choices}[60] == pytest.approx(2 / 3)


def test_pauses_of_unknown_length_are_told() -> None:
    pauses = Spread.of_buckets({60.0: 90, 3600.0: 90, float("inf"): 100})
    advice = advise_ttl(evidence(pauses=pauses, outcomes=(OutcomeCount("hit", "all_held", 100),)), NOW)
    assert advice.unknown == pytest.approx(0.1)
    assert advice.longest_pause == 3600

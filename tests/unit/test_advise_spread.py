"""Single values and histograms, reckoned by hand."""

from __future__ import annotations

import math

import pytest

from bench.advise.spread import Spread

BUCKETS = Spread.of_buckets({10.0: 4, 20.0: 4, 40.0: 8, math.inf: 10})
"""Four up to 10, four from 20 to 40, two beyond."""


@pytest.mark.parametrize(("value", "share"), [(0, 0), (5, 0.2), (10, 0.4), (20, 0.4), (30, 0.6), (40, 0.8), (1e9, 0.8)])
def test_share_of_buckets_is_interpolated_and_never_counts_what_has_no_end(value: float, share: float) -> None:
    assert BUCKETS.share_up_to(value) == pytest.approx(share)


@pytest.mark.parametrize(
    ("cap", "mean"),
    [
        # Of the four up to 10, half are below 5: 2.5 on average.
        (5, (4 * (0.5 * 2.5 + 0.5 * 5) + 6 * 5) / 10),
        (40, (4 * 5 + 4 * 30 + 2 * 40) / 10),
        (100, (4 * 5 + 4 * 30 + 2 * 100) / 10),
    ],
)
def test_capped_mean_of_buckets(cap: float, mean: float) -> None:
    assert BUCKETS.mean_of_capped(cap) == pytest.approx(mean)


def test_single_values() -> None:
    spread = Spread.of_values([30.0, 10.0, 1000.0])
    assert spread.count == 3
    assert spread.share_up_to(9.9) == 0
    assert spread.share_up_to(30) == pytest.approx(2 / 3)
    assert spread.mean_of_capped(60) == pytest.approx(100 / 3)
    assert spread.longest == 1000


def test_what_lies_beyond_the_last_bound_is_told() -> None:
    assert (BUCKETS.count, BUCKETS.beyond, BUCKETS.longest) == (10, 2, 40)


def test_variance_of_values_and_within_buckets() -> None:
    assert Spread.of_values([1.0, 3.0]).variance(2.0) == pytest.approx(1.0)
    assert Spread.of_buckets({6.0: 5}).variance(3.0) == pytest.approx(3.0)


def test_nothing_is_nothing() -> None:
    assert Spread().share_up_to(1) == Spread().mean_of_capped(1) == Spread().longest == Spread().variance(0) == 0

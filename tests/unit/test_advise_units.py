"""Numbers as people read them."""

from __future__ import annotations

import pytest

from bench.advise.units import percent, seconds, tokens


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ms"), (0.0021, "2.1 ms"), (0.42, "420 ms"), (-0.42, "-420 ms"), (1.3, "1.3 s"), (90, "90 s"),
     (480, "480 s"), (3600, "60 min")],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(64, "64"), (9876.4, "9,876"), (12_345, "12,300"), (1.234e6, "1,230,000")])
def test_tokens_have_no_digits_that_are_chance(value: float, text: str) -> None:
    assert tokens(value) == text


@pytest.mark.parametrize(("share", "text"), [(0, "0 %"), (0.004, "0.4 %"), (0.61, "61 %"), (1.28, "128 %")])
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text

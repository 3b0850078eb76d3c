"""Numbers as people read them."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """Like `420 ms`, `1.3 s`, `12 min`."""
    size = abs(value)
    if size < 5e-5:
        return "0 ms"
    if size < 0.0095:
        return f"{1000 * value:.1f} ms"
    if size < 0.9995:
        return f"{1000 * value:.0f} ms"
    if size < 99.5:
        return f"{value:.3g} s"
    return f"{value:,.0f} s" if size < 600 else f"{value / 60:,.0f} min"


def tokens(value: float) -> str:
    """Like `1,234`, to three digits where more are chance."""
    if math.isinf(value):
        return "no number of"
    if value >= 10_000:
        value = round(value, 2 - math.floor(math.log10(value)))
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Like `61 %`, or `0.4 %`."""
    return f"{100 * share:.1f} %" if 0 < share < 0.0095 else f"{100 * share:.0f} %"

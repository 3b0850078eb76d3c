"""Plots as SVG that stands in a page: no fonts, no files, no links; lines and letters take the page's colour."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.multiturn.summary import Spread, Summary
from bench.result import REUSED, Retained

_INK = "#010203"
"""Stands for the page's own colour until the figure is drawn."""

ARM_COLOURS = ("#e07b39", "#2f8fbf", "#8a63c9")
"""Without reuse, with it; legible on white and on black."""

_OUTCOME_COLOURS = {
    "hit": "#2f8fbf",
    "partial": "#76b7d9",
    "first": "#a8a8a8",
    "none": "#8c8c8c",
    "off": "#e07b39",
    "expired": "#d4a72c",
    "diverged": "#b5651d",
    "stale": "#c46bb0",
    "failed": "#d1495b",
    "unsupported": "#6f7d8c",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "turnback",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
}


def ttft_by_context(summary: Summary, arms: Sequence[str]) -> str | None:
    """Medians with P95 above them; None if nothing was measured."""
    rows = [row for row in summary.contexts if row.prompt_tokens is not None]
    points = [(row.prompt_tokens or 0, row.ttft) for row in rows]
    return _curves(points, arms, "prompt tokens (median of each group)") if points else None


def ttft_by_turn(summary: Summary, arms: Sequence[str]) -> str | None:
    """The same by turn."""
    return _curves([(row.turn, row.ttft) for row in summary.turns], arms, "turn") if summary.turns else None


def outcomes_by_turn(summary: Summary, arm: str) -> str | None:
    """What became of reuse, as shares of each turn; None if the server does not tell."""
    rows = [row for row in summary.turns if row.outcomes.get(arm)]
    if not rows:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure()
        turns = [row.turn for row in rows]
        below = [0.0] * len(rows)
        for outcome in sorted({name for row in rows for name in row.outcomes[arm]}, key=_place):
            shares = [row.outcomes[arm].get(outcome, 0) / sum(row.outcomes[arm].values()) for row in rows]
            axes.bar(turns, shares, bottom=below, label=outcome, color=_OUTCOME_COLOURS.get(outcome, "#6f7d8c"))
            below = [low + share for low, share in zip(below, shares, strict=True)]
        axes.set_xlabel("turn")
        axes.set_ylabel("share of turns")
        axes.set_xticks(turns)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure)


def retained_over_time(retained: Sequence[Retained]) -> str | None:
    """Tokens held on each decode worker; None if the server does not tell."""
    looks = [look for look in retained if look.tokens is not None]
    if not looks:
        return None
    with mpl.rc_context(_STYLE):
        figure, axes = _figure()
        for worker in sorted({look.worker for look in looks}):
            own = [look for look in looks if look.worker == worker]
            axes.step([look.at_seconds for look in own], [look.tokens or 0 for look in own], where="post", label=worker)
        axes.set_xlabel("seconds since the run began")
        axes.set_ylabel("tokens")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
        return _svg(figure)


def _curves(points: Sequence[tuple[int, dict[str, Spread]]], arms: Sequence[str], label: str) -> str:
    with mpl.rc_context(_STYLE):
        figure, axes = _figure()
        for arm, colour in zip(arms, ARM_COLOURS, strict=False):
            own = [(at, ttft[arm]) for at, ttft in points if arm in ttft]
            at = [place for place, _ in own]
            median = [1000 * found.p50 for _, found in own]
            name = f"reuse {arm}" if len(arms) > 1 else arm
            axes.plot(at, median, marker="o", color=colour, label=f"{name}: P50, up to P95")
            axes.fill_between(at, median, [1000 * found.p95 for _, found in own], color=colour, alpha=0.2, linewidth=0)
        axes.set_xlabel(label)
        axes.set_ylabel("TTFT, ms")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best")
        return _svg(figure)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    # The namespaces are known in a page, and look like links.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace(_INK, "currentColor")


def _place(outcome: str) -> tuple[bool, int, str]:
    known = list(_OUTCOME_COLOURS)
    return outcome not in REUSED, known.index(outcome) if outcome in known else len(known), outcome

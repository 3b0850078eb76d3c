"""The result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table

from bench.multiturn.summary import ArmRow, ContextRow, Spread, Summary

_LATER = "later turns"
_MANY_SECONDS = 10.0
NOTHING = "-"
"""Where there is no number."""


def tables(summary: Summary) -> RenderableType:
    """All there is to see."""
    arms = [row.arm for row in summary.arms]
    shown: list[RenderableType] = [
        _by_arm(summary),
        _by_context(f"TTFT by context, {_LATER}", summary.contexts, arms),
        _by_turn(summary, arms),
    ]
    if summary.past_ttl is not None:
        shown.append(_by_context("TTFT by context, past the TTL", summary.past_ttl.contexts, arms))
    return Group(*shown, *notes(summary))


def notes(summary: Summary) -> list[str]:
    """What is said beside the tables, one line each."""
    said = []
    if summary.compared:
        said.append(f"Answers equal with and without reuse: {summary.equal} of {summary.compared}.")
    if late := summary.arms[-1].outcomes.get("expired"):
        said.append(
            f"{late} turns came when the TTL was over. In a pause there is also the other arm's turn:"
            " is the TTL too short for that?"
        )
    if (past := summary.past_ttl) is not None:
        fell_back = f"{past.turns - past.reused - past.errors} of {past.turns} turns fell back"
        equal = f", answers equal: {past.equal} of {past.compared}" if past.compared else ""
        said.append(f"Past the TTL: {fell_back} ({counted(past.outcomes)}){equal}.")
    if summary.peak_retained_tokens is not None:
        share = f", {summary.peak_retained_share:.0%} of a worker's KV cache" if summary.peak_retained_share else ""
        said.append(f"Most that decode held for next turns: {summary.peak_retained_tokens:,} tokens{share}.")
    if summary.router_prompt_tokens:
        said.append(f"Prompt tokens as the router counted them, all arms: {counted(summary.router_prompt_tokens)}.")
    return said


def arm_figures(row: ArmRow) -> list[tuple[str, str]]:
    """One arm's column: what it is, and how much."""
    computed_again = f"{row.computed_again_tokens:,}"
    if row.prompt_tokens:
        computed_again += f" ({row.computed_again_tokens / row.prompt_tokens:.0%} of all)"
    return [
        ("turns", f"{row.turns:,}"),
        ("errors", f"{row.errors:,}"),
        (f"TTFT, {_LATER}: P50 / P95 / P99", percentiles(row.later_ttft)),
        ("TTFT, all turns: P50 / P95 / P99", percentiles(row.ttft)),
        ("time per output token: P50 / P95 / P99", percentiles(row.tpot)),
        ("whole turn: P50 / P95 / P99", percentiles(row.turn_seconds)),
        ("prompt tokens", f"{row.prompt_tokens:,}"),
        ("reused", f"{row.reused_tokens:,}"),
        ("computed again", computed_again),
        (f"hit rate, {_LATER}", NOTHING if row.hit_rate is None else f"{row.hit_rate:.0%}"),
        ("outcomes", counted(row.outcomes) or NOTHING),
        ("output tokens per second", _rate(row.output_tokens_per_second)),
        ("prompt tokens per second", _rate(row.prompt_tokens_per_second)),
    ]


def percentiles(found: Spread | None) -> str:
    """In milliseconds; in seconds where there are many."""
    if found is not None and found.p50 >= _MANY_SECONDS:
        return f"{found.p50:.1f} / {found.p95:.1f} / {found.p99:.1f} s"
    return NOTHING if found is None else f"{_ms(found.p50)} / {_ms(found.p95)} / {_ms(found.p99)} ms"


def counted(numbers: dict[str, int]) -> str:
    """`hit 3, first 1`."""
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())


def _by_arm(summary: Summary) -> Table:
    table = _table("", [row.arm if len(summary.arms) == 1 else f"reuse {row.arm}" for row in summary.arms])
    columns = [arm_figures(row) for row in summary.arms]
    for figures in zip(*columns, strict=True):
        table.add_row(figures[0][0], *(value for _, value in figures))
    return table


def _by_context(title: str, rows: Iterable[ContextRow], arms: list[str]) -> Table:
    table = _table(
        f"{title}: P50 / P95 / P99",
        ["prompt tokens", "turns", *arms, *_if_compared(arms, "off / on", "answers equal")],
        first="context",
    )
    for row in rows:
        compared = (times(row.ratio), f"{row.equal} of {row.compared}")
        table.add_row(
            row.context,
            whole(row.prompt_tokens),
            str(max((found.count for found in row.ttft.values()), default=0)),
            *(percentiles(row.ttft.get(arm)) for arm in arms),
            *_if_compared(arms, *compared),
        )
    return table


def _by_turn(summary: Summary, arms: list[str]) -> Table:
    table = _table("TTFT by turn: P50 / P95 / P99", ["prompt tokens", *arms, "outcomes"], first="turn")
    for row in summary.turns:
        table.add_row(
            str(row.turn),
            whole(row.prompt_tokens),
            *(percentiles(row.ttft.get(arm)) for arm in arms),
            counted(row.outcomes.get(arms[-1], {})) or NOTHING,
        )
    return table


def _table(title: str, columns: Iterable[str], first: str = "") -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _if_compared(arms: list[str], *cells: str) -> tuple[str, ...]:
    return cells if len(arms) > 1 else ()


def times(ratio: float | None) -> str:
    """A ratio."""
    return NOTHING if ratio is None else f"{ratio:.2f}"


def whole(number: int | None) -> str:
    """A number of things."""
    return NOTHING if number is None else f"{number:,}"


def _rate(rate: float | None) -> str:
    return NOTHING if rate is None else f"{rate:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"

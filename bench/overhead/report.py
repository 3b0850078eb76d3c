"""What came out: medians over the rounds, what each adds to no router at all, and ratios within the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from bench.overhead.cells import Cell, Result
from bench.overhead.contenders import NO_ROUTER, TURNBACK, TURNBACK_REDIS, VLLM_ROUTER, VLLM_ROUTER_RENDER
from bench.overhead.prompts import ANSWER_PIECES

_FIELDS = tuple(Result.__dataclass_fields__)


@dataclass
class Results:
    """All of a run, round by round."""

    cells: defaultdict[tuple[str, Cell], list[Result]] = field(default_factory=lambda: defaultdict(list))
    memory: defaultdict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    """By contender and size of body: the most bytes that were resident."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders that could not take part, and why."""
    failed: list[str] = field(default_factory=list)
    """Who gave a wrong answer, or none."""

    @property
    def contenders(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(name for name, _ in self.cells))

    def of(self, name: str, cell: Cell) -> Result | None:
        """The medians over the rounds."""
        rounds = self.cells.get((name, cell))
        if not rounds:
            return None
        return Result(**{one: median(getattr(result, one) for result in rounds) for one in _FIELDS})

    def like(self, name: str, cell: Cell) -> Result | None:
        """The same for who does not tell first turns from others."""
        return self.of(name, cell) or self.of(name, _first(cell))


@dataclass(frozen=True)
class Comparison:
    """One contender in one cell, against no router and against vLLM's. Times in seconds."""

    contender: str
    cell: Cell
    result: Result
    added_p50: float | None
    added_p99: float | None
    added_first: float | None
    """To the time to the first part of a stream."""
    added_ratio: float | None
    """What it adds at the median, to what the faster mode of `vllm-router` adds."""
    turns_ratio: float | None
    """Turns per second, likewise: above 1 is more."""
    cpu_ratio: float | None
    memory: int | None


def compare(results: Results) -> list[Comparison]:
    """Each contender in each cell."""
    return [_compared(results, name, cell) for name, cell in results.cells]


def _compared(results: Results, name: str, cell: Cell) -> Comparison:
    result = results.of(name, cell)
    assert result is not None
    bare = results.like(NO_ROUTER, cell)
    rivals = [found for rival in (VLLM_ROUTER, VLLM_ROUTER_RENDER) if (found := results.like(rival, cell))]
    added = None if bare is None or name == NO_ROUTER else result.p50 - bare.p50
    theirs = None if bare is None or not rivals else min(rival.p50 for rival in rivals) - bare.p50
    most = max((rival.turns_per_second for rival in rivals), default=None)
    least = min((rival.cpu_per_turn for rival in rivals), default=None)
    memory = results.memory.get((name, cell.body))
    return Comparison(
        contender=name,
        cell=cell,
        result=result,
        added_p50=added,
        added_p99=None if bare is None or added is None else result.p99 - bare.p99,
        added_first=None if bare is None or added is None else result.first_p50 - bare.first_p50,
        added_ratio=None if added is None or theirs is None or theirs <= 0 else added / theirs,
        turns_ratio=None if most is None else result.turns_per_second / most,
        cpu_ratio=None if not least or not result.cpu_per_turn else result.cpu_per_turn / least,
        memory=round(median(memory)) if memory else None,
    )


def event_costs(results: Results) -> dict[tuple[str, int], float]:
    """By contender and size of body: seconds of CPU for each event of a paced stream.

    What such a turn costs beyond one that is answered in one piece, by the number of its events.
    """
    costs = {}
    for name, cell in results.cells:
        if not cell.pace:
            continue
        paced, whole = results.of(name, cell), results.of(name, Cell(cell.body, False, False, cell.clients))
        if paced is not None and whole is not None and paced.cpu_per_turn:
            costs[name, cell.body] = (paced.cpu_per_turn - whole.cpu_per_turn) / len(ANSWER_PIECES)
    return costs


def tables(results: Results) -> list[Table]:
    """One for each size of body and way of answering; a row for each contender and number of clients."""
    groups: defaultdict[tuple[int, bool, float], list[Comparison]] = defaultdict(list)
    for one in compare(results):
        groups[one.cell.body, one.cell.streams, one.cell.pace].append(one)
    return [_table(*key, groups[key]) for key in sorted(groups)]


def _table(body: int, streams: bool, pace: float, rows: Iterable[Comparison]) -> Table:
    title = f"{body:,} bytes, {'streams' if streams else 'whole answers'}"
    if pace:
        title += f", an event every {1000 * pace:g} ms"
    made = Table(box=box.MARKDOWN, title=title, title_justify="left")
    made.add_column("clients")
    made.add_column("router")
    for column in ("added P50", "P99", "TTFT", "of vllm-router", "turns/s", "ratio", "CPU µs/turn", "ratio", "MB"):
        made.add_column(column, justify="right")
    for one in sorted(rows, key=lambda one: one.cell.clients):
        turns = " hit" if one.cell.reuse else ""
        made.add_row(
            str(one.cell.clients),
            one.contender + turns,
            _ms(one.added_p50),
            _ms(one.added_p99),
            _ms(one.added_first) if streams else "",
            _ratio(one.added_ratio),
            f"{one.result.turns_per_second:,.0f}",
            _ratio(one.turns_ratio),
            f"{1e6 * one.result.cpu_per_turn:,.0f}" if one.result.cpu_per_turn else "",
            _ratio(one.cpu_ratio),
            "" if one.memory is None else f"{one.memory / 1e6:.0f}",
        )
    return made


def verdicts(results: Results) -> list[str]:
    """The goals, as far as the run can tell: one client, streams."""
    said = []
    for one in compare(results):
        cell = one.cell
        if one.contender != TURNBACK or cell.clients != 1 or not cell.streams or cell.pace or one.added_ratio is None:
            continue
        goal = 1.5 if cell.body < 100_000 else 1.0
        what = f"{cell.body:,} bytes, {'reusing' if cell.reuse else 'first'} turns"
        met = "met" if one.added_ratio <= goal else "missed"
        cpu = "" if one.cpu_ratio is None else f"; CPU {one.cpu_ratio:.2f} times"
        said.append(f"{what}: adds {one.added_ratio:.2f} times what vllm-router does (goal {goal}): {met}{cpu}")
        redis = results.of(TURNBACK_REDIS, cell)
        if redis is not None:
            said.append(f"{what}: with Redis {1000 * (redis.p50 - one.result.p50):+.2f} ms (goal: at most 0.3)")
    return said


def as_json(results: Results, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, in seconds and bytes; and what the tables say."""
    return {
        "turnback_overhead": 1,
        **about,
        "left_out": results.left_out,
        "failed": results.failed,
        "cells": [
            {
                "router": one.contender,
                "body": one.cell.body,
                "clients": one.cell.clients,
                "streams": one.cell.streams,
                "reuse": one.cell.reuse,
                "pace": one.cell.pace,
                "median": one.result.to_dict(),
                "rounds": [result.to_dict() for result in results.cells[one.contender, one.cell]],
                "added_p50": one.added_p50,
                "added_p99": one.added_p99,
                "added_first": one.added_first,
                "added_ratio": one.added_ratio,
                "turns_ratio": one.turns_ratio,
                "cpu_ratio": one.cpu_ratio,
                "memory": one.memory,
            }
            for one in compare(results)
        ],
        "events": [
            {"router": name, "body": body, "cpu_seconds": cost} for (name, body), cost in event_costs(results).items()
        ],
        "verdicts": verdicts(results),
    }


def notes(results: Results, load: Sequence[float]) -> list[str]:
    """What to know of the tables."""
    said = [
        "Times in ms over no router; ratios to the better mode of vllm-router; MB: the most memory it had.",
        f"Load of the machine before and after: {load[0]:.1f}, {load[1]:.1f}. Above 2, read CPU and ratios only.",
    ]
    for (name, body), cost in event_costs(results).items():
        said.append(f"{name}, {body:,} bytes: {1e6 * cost:.0f} µs of CPU for each event of a paced stream")
    said += [f"Failed: {what}" for what in results.failed]
    return said + [f"Left out: {name}: {why}" for name, why in results.left_out.items()]


def _first(cell: Cell) -> Cell:
    return Cell(cell.body, cell.streams, False, cell.clients, cell.pace)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

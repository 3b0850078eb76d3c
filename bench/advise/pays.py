"""Whether reuse pays: the first token's time with and without, on prompts of like length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.advise.evidence import Evidence, Pair
from bench.result import REUSED
from proxy.telemetry import CONTEXTS

Verdict = Literal["yes", "no", "cannot tell"]
Why = Literal["measured", "hardly anything is reused", "too few turns", "nothing to compare with"]

MATTERS = 0.02
"""Of the TTFT without reuse: less than this is as good as nothing."""

HARDLY = 0.05
"""Share of turns that reuse something, below which it cannot pay, however much each gains."""

FEW_TURNS = 100
"""In all, below which nothing is said of that share."""

FEW_PAIRS = 10
FEW_IN_CELL = 5
COMPARABLE = 0.5
"""Share of the turns that reused, which must have turns without reuse to be compared with."""

_Z = 1.96
_REPLICATES = 2000


@dataclass(frozen=True)
class Row:
    """One class of context."""

    context: str
    turns_off: int
    turns_on: int
    off: float
    """Mean TTFT, in seconds."""
    on: float


@dataclass(frozen=True)
class PaysAdvice:
    """The verdict, and what it rests on. Gains are seconds by which the first token comes sooner."""

    verdict: Verdict
    why: Why
    rows: tuple[Row, ...]
    compared: int
    """Turns with reuse that were compared."""
    gain: float | None
    low: float | None
    high: float | None
    """The gain lies between these, by 95 %."""
    share: float | None
    """The gain's, of the TTFT without reuse."""
    reusing: float | None
    """Share of all turns that reused something."""
    more_turns: int | None
    """So many more are needed to tell."""
    instead: tuple[str, str] | None
    """The most frequent outcome of turns that reused nothing, and its reason."""


@dataclass(frozen=True)
class _Gain:
    rows: tuple[Row, ...]
    compared: int
    off: float
    gain: float
    low: float
    high: float


def advise_pays(evidence: Evidence) -> PaysAdvice:
    """By pairs of equal turns if there are any, else by the classes of context that have turns of both kinds."""
    turns = evidence.turns
    reusing = evidence.turns_with(REUSED) / turns if turns else None
    measured = _by_pairs(evidence.pairs) if evidence.pairs else _by_cells(evidence)
    verdict, why, more = _judge(measured, few=FEW_PAIRS)
    if reusing is not None and reusing < HARDLY and turns >= FEW_TURNS:
        verdict, why, more = "no", "hardly anything is reused", None
    others = [one for one in evidence.outcomes if one.outcome not in (*REUSED, "off")]
    most = max(others, key=lambda one: one.turns, default=None)
    return PaysAdvice(
        verdict=verdict,
        why=why,
        rows=measured.rows if measured else (),
        compared=measured.compared if measured else 0,
        gain=measured.gain if measured else None,
        low=measured.low if measured else None,
        high=measured.high if measured else None,
        share=measured.gain / measured.off if measured else None,
        reusing=reusing,
        more_turns=more,
        instead=(most.outcome, most.reason) if most else None,
    )


def _judge(measured: _Gain | None, few: int) -> tuple[Verdict, Why, int | None]:
    if measured is None:
        return "cannot tell", "nothing to compare with", None
    if measured.compared < few:
        return "cannot tell", "too few turns", few - measured.compared
    matters = MATTERS * measured.off
    if measured.low > 0 and measured.gain >= matters:
        return "yes", "measured", None
    if measured.high < matters:
        return "no", "measured", None
    # The interval shrinks with the root of the turns; it has to get clear of zero, or of what matters.
    half = (measured.high - measured.low) / 2
    clear = max(abs(measured.gain), abs(measured.gain - matters), matters / 4)
    needed = measured.compared * (half / clear) ** 2
    return "cannot tell", "too few turns", max(math.ceil(needed) - measured.compared, measured.compared // 2)


def _by_pairs(pairs: Iterable[Pair]) -> _Gain:
    by_conversation: dict[int, list[Pair]] = defaultdict(list)
    by_context: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_conversation[pair.conversation].append(pair)
        by_context[pair.context].append(pair)
    counts = np.array([len(some) for some in by_conversation.values()], dtype=np.float64)
    gains = np.array([sum(pair.off - pair.on for pair in some) for some in by_conversation.values()])
    offs = np.array([sum(pair.off for pair in some) for some in by_conversation.values()])
    if len(counts) < FEW_PAIRS:
        # Too few conversations to draw whole ones: turn by turn.
        every = [pair for some in by_conversation.values() for pair in some]
        counts, gains = np.ones(len(every)), np.array([pair.off - pair.on for pair in every])
        offs = np.array([pair.off for pair in every])
    drawn = np.random.default_rng(0).integers(len(counts), size=(_REPLICATES, len(counts)))
    means = np.sort(gains[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return _Gain(
        rows=tuple(
            Row(context, len(some), len(some), _mean(pair.off for pair in some), _mean(pair.on for pair in some))
            for context in CONTEXTS
            if (some := by_context.get(context))
        ),
        compared=int(counts.sum()),
        off=float(offs.sum() / counts.sum()),
        gain=float(gains.sum() / counts.sum()),
        low=float(means[int(0.025 * _REPLICATES)]),
        high=float(means[int(0.975 * _REPLICATES)]),
    )


def _by_cells(evidence: Evidence) -> _Gain | None:
    cells = {(cell.context, cell.reused): cell for cell in evidence.cells if cell.count}
    reusing = sum(cell.count for (_, reused), cell in cells.items() if reused)
    both = [
        (cells[context, False], cells[context, True])
        for context in CONTEXTS
        if all((context, reused) in cells and cells[context, reused].count >= FEW_IN_CELL for reused in (False, True))
    ]
    compared = sum(on.count for _, on in both)
    if not compared or compared < COMPARABLE * reusing:
        return None
    weights = [on.count / compared for _, on in both]
    gain = sum(weight * (off.mean - on.mean) for weight, (off, on) in zip(weights, both, strict=True))
    error = math.sqrt(
        sum(
            weight**2 * (off.variance / off.count + on.variance / on.count)
            for weight, (off, on) in zip(weights, both, strict=True)
        )
    )
    # Turns that asked for their token ids in vain paid for it too.
    served = max(evidence.turns_with(REUSED), reusing)
    gain -= max(evidence.renders - served, 0) / served * evidence.render_seconds
    return _Gain(
        rows=tuple(Row(off.context, off.count, on.count, off.mean, on.mean) for off, on in both),
        compared=compared,
        off=sum(weight * off.mean for weight, (off, _) in zip(weights, both, strict=True)),
        gain=gain,
        low=gain - _Z * error,
        high=gain + _Z * error,
    )


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)

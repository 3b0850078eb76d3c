"""`kv_recompute_threshold`: from how many tokens on copying is faster than computing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bench.advise.evidence import Current, Evidence
from bench.advise.speeds import Speeds, fit

DEFAULT = 64
"""The engine's."""

BLOCK = 16

Verdict = Literal["default", "keep", "set", "never", "cannot tell"]


@dataclass(frozen=True)
class ThresholdAdvice:
    """What to set, and why."""

    verdict: Verdict
    """`default`: the engine's own is right; `keep`: what is set cannot be told from the best; `never`: copying
    takes longer at every length seen."""
    recommended: int | None
    crossing: float | None
    """Tokens at which both take as long; infinite if copying never gets faster."""
    low: float | None
    high: float | None
    """The crossing lies between these, by 95 %."""
    speeds: Speeds | None
    prompts: int
    """This rests on."""
    shortest_copied: float
    longest: float
    """Prompt seen. Nothing is said of longer ones."""


def advise_threshold(evidence: Evidence, current: Current) -> ThresholdAdvice:
    """The crossing point, rounded up to whole blocks; or that there is no need to change, or no way to tell."""
    points = [point for point in evidence.points if point.seconds > 0 and point.count > 0]
    copied = [point.copied for point in points if point.copied > 0]
    longest = max((point.computed + point.copied for point in points), default=0.0)
    prompts = sum(point.count for point in points)
    shortest = min(copied, default=0.0)
    found = fit(points)
    if found is None:
        return ThresholdAdvice("cannot tell", None, None, None, None, None, prompts, shortest, longest)
    low, high = found.crossing_interval()
    crossing = found.best.crossing()
    verdict, recommended = verdict_on(low, crossing, high, longest, current.threshold)
    return ThresholdAdvice(verdict, recommended, crossing, low, high, found.best, prompts, shortest, longest)


def verdict_on(low: float, crossing: float, high: float, longest: float, now: int) -> tuple[Verdict, int | None]:
    """What follows from a crossing between ``low`` and ``high``, if prompts up to ``longest`` were seen."""
    if low > longest:
        return "never", None
    if high > longest:
        return "cannot tell", None
    if high <= DEFAULT:
        return "default", DEFAULT
    if low <= now <= high:
        return "keep", now
    return "set", max(DEFAULT, math.ceil(round(crossing) / BLOCK) * BLOCK)

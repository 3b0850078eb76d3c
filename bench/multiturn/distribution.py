"""Lengths and pauses as one writes them: `300`, `100..500`, `exp:MEAN`, `lognormal:MEDIAN:SIGMA`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FORMS = "N, LOW..HIGH, exp:MEAN or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Draws numbers that are not negative."""

    kind: str
    numbers: tuple[float, ...]

    def draw(self, by: random.Random) -> float:
        """The next number that ``by`` gives."""
        first, *others = self.numbers
        if self.kind == "uniform":
            return by.uniform(first, others[0])
        if self.kind == "exp":
            return by.expovariate(1 / first) if first else 0.0
        if self.kind == "lognormal":
            return by.lognormvariate(math.log(first), others[0]) if first else 0.0
        return first

    def tokens(self, by: random.Random) -> int:
        """The next number as a length: whole, at least 1."""
        return max(1, round(self.draw(by)))


def distribution(text: str) -> Distribution:
    """The distribution that ``text`` names. Raises ``ValueError``."""
    kind, *numbers = text.split(":")
    if kind not in ("exp", "lognormal"):
        kind, numbers = ("uniform", text.split("..")) if ".." in text else ("fixed", [text])
    wrong = ValueError(f"{text!r} is none of {FORMS}")
    try:
        values = tuple(float(number) for number in numbers)
    except ValueError:
        raise wrong from None
    if len(values) != {"fixed": 1, "uniform": 2, "exp": 1, "lognormal": 2}[kind]:
        raise wrong
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise wrong
    if kind == "uniform" and values[0] > values[1]:
        raise ValueError(f"{text!r}: the lower bound comes first")
    return Distribution(kind, values)

"""How often which value was seen: single values and histograms, both the same way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """``count`` values, spread evenly from ``low`` to ``high``; or all at one place."""

    low: float
    high: float
    """Infinite for a histogram's last bucket: nobody knows how far it goes."""
    count: float

    def share_up_to(self, value: float) -> float:
        """Of its values, from 0 to 1. Those without a known end are never counted."""
        if self.high <= value:
            return 1.0
        if value <= self.low or math.isinf(self.high):
            return 0.0
        return (value - self.low) / (self.high - self.low)

    def mean_of_capped(self, cap: float) -> float:
        """The mean of its values, longer ones taken as ``cap``; those without a known end too."""
        if cap <= self.low or math.isinf(self.high):
            return cap
        if self.high <= cap:
            return (self.low + self.high) / 2
        below = self.share_up_to(cap)
        return below * (self.low + cap) / 2 + (1 - below) * cap


@dataclass(frozen=True)
class Spread:
    """Values, as far as they are known."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Spread:
        """Of values that are known one by one."""
        return cls(tuple(Part(value, value, 1) for value in sorted(values)))

    @classmethod
    def of_buckets(cls, up_to: Mapping[float, float]) -> Spread:
        """Of a histogram: upper bound → how many values are not above it, as Prometheus counts them."""
        parts = []
        low = before = 0.0
        for high, seen in sorted(up_to.items()):
            if seen > before:
                parts.append(Part(low, high, seen - before))
            low, before = high, max(seen, before)
        return cls(tuple(parts))

    @property
    def count(self) -> float:
        """How many values."""
        return sum(part.count for part in self.parts)

    @property
    def beyond(self) -> float:
        """How many of them are only known to be longer than the last bound of a histogram."""
        return sum(part.count for part in self.parts if math.isinf(part.high))

    @property
    def longest(self) -> float:
        """The longest that is known; 0 if none is."""
        return max((part.low if math.isinf(part.high) else part.high for part in self.parts), default=0.0)

    def share_up_to(self, value: float) -> float:
        """The share of all values that are not above ``value``; 0 if there are none."""
        if not self.count:
            return 0.0
        return sum(part.count * part.share_up_to(value) for part in self.parts) / self.count

    def mean_of_capped(self, cap: float) -> float:
        """The mean, with values above ``cap`` taken as ``cap``; 0 if there are none."""
        if not self.count:
            return 0.0
        return sum(part.count * part.mean_of_capped(cap) for part in self.parts) / self.count

    def at(self, share: float) -> float:
        """The value that ``share`` of all values do not exceed; infinite where it is beyond the last bound."""
        wanted = share * self.count
        for part in self.parts:
            if wanted <= part.count:
                if math.isinf(part.high):
                    return math.inf
                return part.low + (part.high - part.low) * max(wanted, 0) / part.count
            wanted -= part.count
        return self.longest

    def variance(self, mean: float) -> float:
        """About ``mean``, which is known better than the buckets tell. Those without an end count where they begin."""
        if not self.count:
            return 0.0
        total = 0.0
        for part in self.parts:
            high = part.low if math.isinf(part.high) else part.high
            total += part.count * (((part.low + high) / 2 - mean) ** 2 + (high - part.low) ** 2 / 12)
        return total / self.count

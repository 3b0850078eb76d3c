"""How fast prefill computes and how fast blocks are copied, from how long prompts took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.advise.evidence import Point

Numbers = NDArray[np.float64]

FEW = 8
"""Single prompts, with and without reuse each, below which nothing is fitted."""

REPLICATES = 300

GROUPS = 8
"""Conversations, from which on whole ones are drawn anew: turns of one are alike."""

_FIXED, _COMPUTE, _ATTEND, _COPY, _START = range(5)
"""The terms. All but the first cannot be below zero."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of a prompt of which ``m`` tokens are computed and ``c`` are copied.

    They are

    fixed + compute·m + attend·((c + m)² - c²) + copy·c + start, the last only if c > 0.
    """

    fixed: float
    compute: float
    attend: float
    copy: float
    start: float

    def crossing(self) -> float:
        """The number of tokens at which copying takes as long as computing; more are copied faster.

        0 if copying is faster from the first token on, infinite if it never is.
        """
        # Whatever is computed behind them: compute·n + attend·n² = copy·n + start.
        gain = self.compute - self.copy
        if self.start <= 0 and gain >= 0:
            return 0.0
        if self.attend > 0:
            return (-gain + math.sqrt(gain * gain + 4 * self.attend * max(self.start, 0.0))) / (2 * self.attend)
        return self.start / gain if gain > 0 else math.inf

    def computing(self, tokens: float) -> float:
        """Seconds for a prompt of ``tokens``, without what every prompt costs."""
        return self.compute * tokens + self.attend * tokens * tokens

    def copying(self, tokens: float) -> float:
        """Seconds for getting the first ``tokens`` from decode."""
        return self.start + self.copy * tokens


@dataclass(frozen=True)
class Fit:
    """The speeds that explain the points best, and others that explain them nearly as well."""

    best: Speeds
    others: tuple[Speeds, ...]

    def crossing_interval(self) -> tuple[float, float]:
        """Between these the crossing lies, by 95 %. The upper end may be infinite."""
        crossings = sorted(one.crossing() for one in self.others)
        # Not interpolated: some may be infinite.
        last = len(crossings) - 1
        return crossings[math.floor(0.025 * last)], crossings[math.ceil(0.975 * last)]


def fit(points: Sequence[Point], seed: int = 0) -> Fit | None:
    """The speeds behind ``points``; None if they are too few, or too much alike, to tell."""
    plain = sum(point.count for point in points if point.copied <= 0)
    reusing = sum(point.count for point in points if point.copied > 0)
    if min(plain, reusing) < FEW:
        return None
    sample = _Sample.of(points)
    best = sample.speeds()
    if best is None:
        return None
    draw = np.random.default_rng(seed)
    others = [speeds for _ in range(REPLICATES) if (speeds := sample.drawn_anew(draw, best).speeds()) is not None]
    # Where a fit is often impossible, it says little where it is possible.
    return Fit(best, tuple(others)) if len(others) >= 0.8 * REPLICATES else None


@dataclass(frozen=True)
class _Sample:
    terms: Numbers
    seconds: Numbers
    counts: Numbers
    errors: Numbers
    """Of the means of points that count several prompts; 0 for single ones."""
    groups: NDArray[np.int64]

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Sample:
        computed = np.array([point.computed for point in points], dtype=np.float64)
        copied = np.array([point.copied for point in points], dtype=np.float64)
        counts = np.array([point.count for point in points], dtype=np.float64)
        variances = np.array([point.variance for point in points], dtype=np.float64)
        return cls(
            terms=np.stack(
                [np.ones_like(computed), computed, (copied + computed) ** 2 - copied**2, copied, copied > 0], axis=1
            ),
            seconds=np.array([point.seconds for point in points], dtype=np.float64),
            counts=counts,
            errors=np.sqrt(variances / counts),
            groups=np.array([point.group for point in points]),
        )

    def speeds(self) -> Speeds | None:
        """By least squares of what is off relative to the time itself, outliers counting less."""
        simple = self._robust([_FIXED, _COMPUTE, _COPY, _START])
        full = self._robust([_FIXED, _COMPUTE, _ATTEND, _COPY, _START])
        # The quadratic term has to explain more than a term of no meaning would (BIC).
        found = simple if full is None or (simple is not None and simple[1] <= full[1]) else full
        if found is None or not (found[0][_COMPUTE] or found[0][_ATTEND]):
            return None
        return Speeds(*(float(value) for value in found[0]))

    def drawn_anew(self, draw: np.random.Generator, best: Speeds) -> _Sample:
        """Another sample as chance might have brought it (bootstrap)."""
        if self.errors.any():
            expected = self.terms @ np.array([best.fixed, best.compute, best.attend, best.copy, best.start])
            # What the means are off by more than their own errors explain is an error too.
            errors = np.maximum(self.errors, 1e-6 * self.seconds)
            free = max(len(self.seconds) - self.terms.shape[1], 1)
            misfit = max(1.0, float((((self.seconds - expected) / errors) ** 2).sum() / free))
            drawn = self.seconds + draw.normal(size=len(self.seconds)) * errors * math.sqrt(misfit)
            return self._with(slice(None), np.maximum(drawn, 0.05 * self.seconds))
        names, members = np.unique(self.groups, return_inverse=True)
        if len(names) < GROUPS:
            return self._with(draw.integers(len(self.seconds), size=len(self.seconds)))
        weights = np.bincount(draw.integers(len(names), size=len(names)), minlength=len(names))
        return self._with(np.repeat(np.arange(len(self.seconds)), weights[members]))

    def _with(self, rows: Any, seconds: Numbers | None = None) -> _Sample:
        return _Sample(
            self.terms[rows],
            self.seconds[rows] if seconds is None else seconds,
            self.counts[rows],
            self.errors[rows],
            self.groups[rows],
        )

    def _robust(self, used: list[int]) -> tuple[Numbers, float] | None:
        """The coefficients of the terms ``used`` (the others 0), and how badly they do (BIC; less is better)."""
        weights = self.counts / self.seconds**2
        found = self._positive(used, weights)
        for _ in range(4):
            if found is None:
                return None
            off = np.abs(self.terms @ found - self.seconds) / self.seconds
            usual = max(1.4826 * float(np.median(off)), 1e-9)
            # Huber: what is further off than usual counts by its size only, not by its square.
            found = self._positive(used, weights * np.minimum(1.0, 1.345 * usual / np.maximum(off, 1e-12)))
        if found is None:
            return None
        off = np.minimum(np.abs(self.terms @ found - self.seconds) / self.seconds, 3 * usual)
        squares = max(float((self.counts * off**2).sum() / self.counts.sum()), 1e-18)
        return found, len(self.seconds) * math.log(squares) + len(used) * math.log(len(self.seconds))

    def _positive(self, used: list[int], weights: Numbers) -> Numbers | None:
        """Weighted least squares; terms that come out below zero are left out. None if the points cannot tell."""
        used = list(used)
        while True:
            terms = self.terms[:, used]
            scale = np.abs(terms).max(axis=0)
            if not scale.all():
                return None
            terms = terms / scale
            weighted = terms * weights[:, None]
            solved, _, rank, _ = np.linalg.lstsq(weighted.T @ terms, weighted.T @ self.seconds, rcond=1e-12)
            if rank < len(used):
                return None
            negative = [(value, term) for value, term in zip(solved, used, strict=True) if term != _FIXED and value < 0]
            if not negative:
                found = np.zeros(self.terms.shape[1])
                found[used] = solved / scale
                return found
            used.remove(min(negative)[1])

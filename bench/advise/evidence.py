"""What the advice rests on, wherever it was measured. Times are seconds, lengths are tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bench.advise.spread import Spread

LEAVES_ENTRY = ("hit", "partial", "first", "diverged", "expired", "stale", "failed", "off")
"""Outcomes of turns after which decode holds something for the next one; where reuse is off: would hold it."""


def leaves_entry(outcome: str | None, reason: str | None) -> bool:
    """Whether decode holds something for the next turn after one that ended so."""
    return outcome in LEAVES_ENTRY or reason == "below_threshold"


@dataclass(frozen=True)
class Point:
    """How long ``count`` prompts took, on average, of which so much was computed and so much was copied."""

    computed: float
    copied: float
    seconds: float
    count: int = 1
    variance: float = 0.0
    """Of the seconds of single prompts, where several were counted together."""
    group: int = 0
    """Points of one group were measured on one conversation."""


@dataclass(frozen=True)
class Pair:
    """TTFT of the same turn of the same conversation, without and with reuse."""

    conversation: int
    context: str
    off: float
    on: float


@dataclass(frozen=True)
class Cell:
    """TTFT of the turns of one class of context that did, or did not, reuse something."""

    context: str
    reused: bool
    count: int
    mean: float
    variance: float


@dataclass(frozen=True)
class OutcomeCount:
    """How many turns ended so."""

    outcome: str
    reason: str
    turns: int

    @property
    def leaves_entry(self) -> bool:
        """Whether decode then holds something for the next turn."""
        return leaves_entry(self.outcome, self.reason)


@dataclass(frozen=True)
class Held:
    """What decode holds, all workers together."""

    entries: float
    tokens: float
    share: float | None
    """The fullest worker's, from 0 to 1."""


@dataclass(frozen=True)
class Told:
    """What is set, as those tell who measured: the different values of each setting, in order. Empty: not told."""

    ttl: tuple[float, ...] = ()
    threshold: tuple[int, ...] = ()
    retained_share: tuple[float, ...] = ()


Origin = Literal["option", "metrics", "bench", "default"]


@dataclass(frozen=True)
class Current:
    """What is set now, as far as it was told; else the defaults."""

    ttl: float = 480.0
    threshold: int = 64
    retained_share: float = 0.5
    margin: float = 10.0
    """An entry is not used any more so many seconds before the TTL is over."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """By the names above: who told it. A default that nobody told may be missing."""


@dataclass(frozen=True)
class Evidence:
    """All that was seen. What is not known is None or empty."""

    source: str
    """In words: where it comes from."""
    kind: Literal["bench", "router"]
    outcomes: tuple[OutcomeCount, ...] = ()
    pauses: Spread = field(default_factory=Spread)
    turns_per_second: float | None = None
    """That leave an entry."""
    tokens_per_entry: float | None = None
    capacity_tokens: int | None = None
    """Of the KV caches of all decode workers together."""
    held: Held | None = None
    """Now, or at most."""
    points: tuple[Point, ...] = ()
    points_are: Literal["prefill legs", "first tokens"] = "prefill legs"
    """What ``points`` tell the seconds of."""
    pairs: tuple[Pair, ...] = ()
    cells: tuple[Cell, ...] = ()
    renders: int = 0
    render_seconds: float = 0.0
    """The mean of one. It is part of the TTFT of turns that reuse."""

    told: Told = field(default_factory=Told)

    recomputed_share: float | None = None
    """Of all prompt tokens: those that an earlier turn had computed, and that were computed again."""

    @property
    def turns(self) -> int:
        """Those that were allowed to reuse."""
        return sum(one.turns for one in self.outcomes if one.outcome != "off")

    @property
    def entries_left(self) -> int:
        """Turns after which decode held something for the next one, or would have, had reuse been on."""
        return sum(one.turns for one in self.outcomes if one.leaves_entry)

    def turns_with(self, outcomes: Iterable[str]) -> int:
        """Turns that ended with one of ``outcomes``."""
        wanted = set(outcomes)
        return sum(one.turns for one in self.outcomes if one.outcome in wanted)

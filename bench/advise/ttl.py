"""`decoder_kv_blocks_ttl`: which returns a TTL keeps, and what it holds for that."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.advise.evidence import Current, Evidence

CANDIDATES = (15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 480, 600, 900, 1200, 1800, 2700, 3600)
"""Seconds."""

NEARLY_ALL = 0.95
"""Of what the longest candidate would keep: more TTL than that buys little."""

FEW = 20
"""Returns, below which nothing is said."""


@dataclass(frozen=True)
class Choice:
    """What one TTL would give and cost."""

    ttl: float
    kept: float
    """Share of the returns that come in time, from 0 to 1."""
    tokens: float | None
    """Held on average by all decode workers together."""
    share: float | None
    """Of all their KV caches."""


@dataclass(frozen=True)
class TtlAdvice:
    """What to set, and why."""

    recommended: float | None
    """None: too little was seen."""
    choices: tuple[Choice, ...]
    now: Choice
    """What is set now."""
    returns: int
    """How many pauses this rests on."""
    kept_low: float
    kept_high: float
    """Between these the kept share of ``recommended`` lies, by 95 %, as far as chance goes."""
    returning: float
    """Share of the turns that left an entry, after which the conversation went on."""
    bound: float
    """Share of the KV caches that retained blocks may take."""
    fits: bool
    """Whether what is recommended stays below that; True where it is not known."""
    best_without_bound: float | None
    """What would be recommended if memory did not matter."""
    longest_pause: float
    unknown: float
    """Share of the pauses of which only that they are longer is known."""


def advise_ttl(evidence: Evidence, current: Current) -> TtlAdvice:
    """The shortest TTL that keeps nearly all of what the longest would, within the memory that may be held."""
    choices = tuple(_choice(float(ttl), evidence, current) for ttl in CANDIDATES)
    enough = NEARLY_ALL * choices[-1].kept
    best = next(choice for choice in choices if choice.kept >= enough)
    fitting = [choice for choice in choices if choice.share is None or choice.share <= current.retained_share]
    returns = round(evidence.pauses.count)
    chosen = next((choice for choice in fitting if choice.kept >= enough), fitting[-1] if fitting else choices[0])
    # Of those that keep as much, the shortest.
    chosen = next(choice for choice in choices if choice.kept >= chosen.kept)
    low, high = _wilson(chosen.kept, returns)
    told = returns >= FEW and best.kept > 0
    return TtlAdvice(
        recommended=chosen.ttl if told else None,
        choices=choices,
        now=_choice(current.ttl, evidence, current),
        returns=returns,
        kept_low=low,
        kept_high=high,
        returning=_returning(evidence),
        bound=current.retained_share,
        fits=chosen in fitting,
        best_without_bound=best.ttl if told else None,
        longest_pause=evidence.pauses.longest,
        unknown=evidence.pauses.beyond / returns if returns else 0.0,
    )


def _choice(ttl: float, evidence: Evidence, current: Current) -> Choice:
    tokens = held_tokens(ttl, evidence, current)
    capacity = evidence.capacity_tokens
    return Choice(
        ttl=ttl,
        kept=evidence.pauses.share_up_to(ttl - current.margin),
        tokens=tokens,
        share=tokens / capacity if tokens is not None and capacity else None,
    )


def held_seconds(ttl: float, evidence: Evidence) -> float:
    """For how long decode holds a turn's blocks on average: until the next turn, or until the TTL is over."""
    returning = _returning(evidence)
    return returning * evidence.pauses.mean_of_capped(ttl) + (1 - returning) * ttl


def held_tokens(ttl: float, evidence: Evidence, current: Current) -> float | None:
    """Tokens held on average, by Little's law: turns a second, times how long each holds, times its tokens.

    None if it is not known how many turns come, or how long they are.
    """
    if evidence.turns_per_second is not None and evidence.tokens_per_entry is not None:
        return evidence.turns_per_second * held_seconds(ttl, evidence) * evidence.tokens_per_entry
    now = held_seconds(current.ttl, evidence)
    if evidence.held is None or not now:
        return None
    # What is held now, with the TTL of now, tells how many turns come.
    return evidence.held.tokens * held_seconds(ttl, evidence) / now


def _returning(evidence: Evidence) -> float:
    left = evidence.entries_left
    return min(evidence.pauses.count / left, 1.0) if left else 0.0


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share seen in ``count`` trials."""
    if not count:
        return 0.0, 1.0
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)

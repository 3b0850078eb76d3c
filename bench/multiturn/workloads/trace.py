"""Requests of a trace, told by lengths, times and block hashes, as conversations.

The first prompt's text is made from its block ids: requests that had blocks in common in the trace have
them in common again, so prefix caches see what they saw. Later prompts are the history, with the answers
that this server gives, and as much new text as the trace's prompt was longer than the history.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec

from bench.multiturn.talk import Made, Part, Talk, Turn

Length = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace. Times are seconds, lengths tokens."""

    at: float
    input: int
    output: int
    blocks: array[int]
    """Packed, since traces have millions of them; see ``packed``."""


def packed(blocks: Sequence[int]) -> array[int]:
    """Ids of blocks."""
    return array("q", blocks)


def talk_of(requests: Sequence[Request], block_size: int, time_scale: float) -> Talk:
    """The conversation that ``requests`` were, one a turn, with the time between them times ``time_scale``."""
    first = requests[0]
    opening = Made("user", _prompt(first, block_size))
    turns = [Turn((opening,), max(1, first.output))]
    for last, request in pairwise(requests):
        # Histories that were shortened or rewritten still have something new to say.
        new = max(1, request.input - last.input - last.output)
        key = f"after {last.at} {list(last.blocks[-1:])} {list(request.blocks[-1:])}"
        wait = max(0.0, request.at - last.at) * time_scale
        turns.append(Turn((Made("user", (Part(key, new),)),), max(1, request.output), wait, "request"))
    return Talk(tuple(turns), first.at * time_scale)


def _prompt(request: Request, block_size: int) -> tuple[Part, ...]:
    """Text by block; without block ids the text is nobody else's."""
    rest = max(1, request.input)
    parts: list[Part] = []
    for block in request.blocks:
        if rest <= 0:
            break
        parts.append(Part(f"block {block}", min(block_size, rest)))
        rest -= block_size
    if rest > 0:
        parts.append(Part(f"alone {request.at} {request.input} {list(request.blocks[-1:])}", rest))
    return tuple(parts)

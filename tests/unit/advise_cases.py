"""Made-up evidence whose best answer is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bench.advise.evidence import Cell, Evidence, OutcomeCount, Point
from bench.advise.spread import Spread
from bench.result import Result, TurnResult


def evidence(**told: Any) -> Evidence:
    return Evidence(**{"source": "a test", "kind": "router", **told})


def returns(*pauses: float, turns: int | None = None, **told: Any) -> Evidence:
    """Conversations that came back after ``pauses``; of ``turns`` turns, if more left an entry."""
    ended = (OutcomeCount("hit", "all_held", turns or len(pauses)),)
    return evidence(pauses=Spread.of_values(pauses), outcomes=ended, **told)


def seconds_of(
    computed: float, copied: float, *, compute: float, copy: float, start: float, attend: float = 0.0
) -> float:
    """A prompt's time, with 10 ms that every one costs."""
    attended = attend * ((computed + copied) ** 2 - copied**2)
    return 0.01 + compute * computed + attended + copy * copied + (start if copied else 0.0)


def prompts(noise: float = 0.0, conversations: int = 40, seed: int = 1, **speeds: float) -> tuple[Point, ...]:
    """Conversations of six turns, every other one without reuse, timed with ``noise`` relative to the time."""
    chance = random.Random(seed)
    made = []
    for conversation in range(conversations):
        held = 0
        for _ in range(6):
            new = chance.randint(50, 1500)
            copied = held if conversation % 2 else 0
            computed = held + new - copied
            seconds = seconds_of(computed, copied, **speeds) * chance.lognormvariate(0, noise)
            made.append(Point(computed, copied, seconds, group=conversation))
            held += new
    return tuple(made)


def cells(off: Sequence[float], on: Sequence[float], count: int = 100, spread: float = 0.1) -> tuple[Cell, ...]:
    """TTFTs of the classes from 1k-2k on, without and with reuse, which scatter by ``spread`` of their mean."""
    classes = ("1k-2k", "2k-4k", "4k-8k", "8k-16k")
    return tuple(
        Cell(context, reused, count, mean, (spread * mean) ** 2)
        for reused, means in ((False, off), (True, on))
        for context, mean in zip(classes, means, strict=False)
    )


def turn(arm: str, conversation: int, number: int, ttft: float, **told: Any) -> TurnResult:
    """One turn of a bench, complete unless ``told`` otherwise."""
    reuses = arm == "on" and number > 1
    return TurnResult(
        **{
            "arm": arm,
            "conversation": conversation,
            "turn": number,
            "phase": "main",
            "prompt_tokens": 1000 * number,
            "output_tokens": 100,
            "reused_tokens": 1000 * (number - 1) if reuses else 0,
            "outcome": "off" if arm == "off" else "hit" if reuses else "first",
            "reason": "all_held" if reuses else "nothing_stored",
            "ttft_seconds": ttft,
            "turn_seconds": ttft + 1.0,
            "pause_seconds": 5.0 if number > 1 else None,
            "started_seconds": 10.0 * number + conversation,
            **told,
        }
    )


def result(turns: Sequence[TurnResult], **told: Any) -> Result:
    return Result(
        **{
            "created": "2026-11-29T10:00:00Z",
            "settings": {},
            "arms": ["off", "on"],
            "workload": {},
            "turns": list(turns),
            **told,
        }
    )

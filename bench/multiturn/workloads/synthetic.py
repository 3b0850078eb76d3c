"""Conversations as agents have them: a system prompt, then tool output after tool output. Seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.multiturn.distribution import Distribution
from bench.multiturn.talk import Made, Part, Talk, Turn


@dataclass(frozen=True, slots=True)
class Shape:
    """How long everything is."""

    turns: Distribution
    system: Distribution
    """The system prompt, the same text in all conversations as far as it goes."""
    tool: Distribution
    """What is said before each answer, in tokens."""
    answer: Distribution
    pause: Distribution
    """Seconds between an answer and the next request."""


def synthetic(shape: Shape, conversations: int, seed: int) -> list[Talk]:
    """``conversations`` of that shape; the same for the same seed."""
    return [_talk(shape, random.Random(f"{seed}-{number}"), f"{seed}-{number}") for number in range(conversations)]


def _talk(shape: Shape, draw: random.Random, key: str) -> Talk:
    system = Made("system", (Part("system", shape.system.tokens(draw)),))
    turns = []
    for number in range(shape.turns.tokens(draw)):
        tool = Made("user", (Part(f"{key}-{number}", shape.tool.tokens(draw)),))
        wait = shape.pause.draw(draw) if number else 0.0
        turns.append(Turn((tool,) if number else (system, tool), shape.answer.tokens(draw), wait))
    return Talk(tuple(turns))


def by_context(shape: Shape, contexts: Sequence[int], conversations: int, seed: int) -> list[Talk]:
    """For each of ``contexts`` so many conversations whose second prompt has that many tokens, contexts in turns.

    The rest is as ``shape`` says, without its system prompt. Raises ``ValueError`` for a context that is too
    short for an answer and what is said after it.
    """
    return [
        _with_context(shape, context, random.Random(f"{seed}-{context}-{number}"), f"{seed}-{context}-{number}")
        for number in range(conversations)
        for context in contexts
    ]


def _with_context(shape: Shape, context: int, draw: random.Random, key: str) -> Talk:
    count = max(2, shape.turns.tokens(draw))
    answers = [shape.answer.tokens(draw) for _ in range(count)]
    tools = [shape.tool.tokens(draw) for _ in range(count)]
    opening = context - answers[0] - tools[1]
    if opening < 1:
        raise ValueError(f"{context} tokens are too few for an answer of {answers[0]} and {tools[1]} after it")
    lengths = [opening, *tools[1:]]
    return Talk(
        tuple(
            Turn(
                (Made("user", (Part(f"{key}-{number}", tokens),)),),
                answer,
                shape.pause.draw(draw) if number else 0.0,
            )
            for number, (tokens, answer) in enumerate(zip(lengths, answers, strict=True))
        ),
        context=context,
    )

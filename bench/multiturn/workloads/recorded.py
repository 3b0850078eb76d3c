"""Messages that were recorded, as turns."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.multiturn.distribution import Distribution
from bench.multiturn.talk import Json, Recorded, Talk, Turn
from bench.multiturn.words import estimated_tokens


def recorded_talk(
    messages: Sequence[Json], pause: Distribution, draw: random.Random, tools: Sequence[Json] = ()
) -> Talk:
    """One turn for each message of the assistant's; what nobody answered at the end is left out."""
    turns: list[Turn] = []
    said: list[Recorded] = []
    for message in messages:
        if message["role"] != "assistant":
            said.append(Recorded(message))
            continue
        if not said:
            # Twice the assistant: nothing was asked in between.
            continue
        wait = pause.draw(draw) if turns else 0.0
        turns.append(Turn(tuple(said), estimated_tokens(message), wait, recorded_answer=Recorded(message)))
        said = []
    return Talk(tuple(turns), tools=tuple(tools))

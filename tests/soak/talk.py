"""Conversations as clients have them: they go on, are edited, cut, forked, begun anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.contract.answers import OPENING, chat, user

Json = dict[str, Any]

_LONGEST = 9
"""Messages; then it is cut to its beginning."""
_MANNERS = ("", "", "", "", "[halves] ", "[think] ", "[long] ", "[short] ")


@dataclass
class Conversation:
    """One, and what its client believes was said."""

    name: str
    messages: list[Json] = field(default_factory=list)

    def next(self, chance: Random) -> list[Json]:
        """The history of the next turn; what the client did to it is up to chance."""
        if len(self.messages) >= _LONGEST:
            self.messages = self.messages[: chance.choice((1, 3))]
        messages = list(self.messages)
        what = chance.random()
        if not messages or what < 0.04:
            return [self._question(chance, opening=True)]
        if what < 0.10:  # the same again
            return messages
        if what < 0.18:  # something that was said is put otherwise
            place = chance.randrange(len(messages))
            messages[place] = messages[place] | {"content": f"No: {chance.randrange(1000)}."}
        elif what < 0.26:  # back to an earlier point
            messages = messages[: 1 + 2 * chance.randrange(1 + len(messages) // 2)]
            if len(messages) % 2:
                return messages
        return [*messages, self._question(chance)] if messages[-1]["role"] == "assistant" else messages

    def said(self, messages: list[Json], answer: Json) -> None:
        """The client takes an answer for what was said."""
        self.messages = [*messages, {name: value for name, value in answer.items() if value is not None}]

    def _question(self, chance: Random, *, opening: bool = False) -> Json:
        subject = f"{OPENING} In number {self.name}:" if opening else "And then?"
        return user(f"{chance.choice(_MANNERS)}{subject} {chance.randrange(1000)}")


def body(messages: list[Json], turn: int, chance: Random) -> Json:
    """A request; its user's name tells which turn it is of, on every leg."""
    more: Json = {"stream": True} if chance.random() < 0.7 else {}
    return chat(messages, user=f"turn-{turn}", **more)

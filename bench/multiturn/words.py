"""Text of a wanted length in tokens, by what the server itself counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.multiturn.talk import Json, Made, Message, Part, Recorded

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because long
each just state those people too mr how little good world make very year still see own work men day get here old
life both between being under three never know same last another while us might great go come since against right
came take used himself few house use place during high without again home around small however found part once
"""
WORDS = _TEXT.split()

_LETTERS_PER_WORD = sum(len(word) + 1 for word in WORDS) / len(WORDS)


def words(key: str, count: int) -> list[str]:
    """``count`` words, always the same for ``key``; fewer of one key are the beginning of more."""
    return random.Random(key).choices(WORDS, k=count)


@dataclass(frozen=True, slots=True)
class Measure:
    """What the server's tokenizer and template make of text. Lengths are estimates, good to a few per cent."""

    per_word: float
    """Tokens."""
    per_message: float
    """Tokens that the template adds to a message."""
    per_prompt: float
    """Tokens that it adds besides."""

    def text(self, parts: Sequence[Part], overhead: float = 0.0, variant: str = "") -> str:
        """Text of as many tokens as ``parts`` have, less ``overhead``. Equal first parts make equal beginnings.

        With another ``variant`` it is another text.
        """
        wanted = max(1, round((sum(part.tokens for part in parts) - overhead) / self.per_word))
        made: list[str] = []
        for part in parts:
            made += words(f"{variant} {part.key}", max(1, round(part.tokens / self.per_word)))
        if len(made) < wanted:
            made += words(f"{variant} {parts[-1].key} and on", wanted - len(made))
        return " ".join(made[:wanted])

    def said(self, message: Message, *, opens: bool, variant: str = "") -> Json:
        """``message`` as it is sent; ``opens`` if it is the first of its conversation. See ``text``."""
        if isinstance(message, Recorded):
            return message.message
        overhead = self.per_message + (self.per_prompt if opens else 0.0)
        return {"role": message.role, "content": self.text(message.parts, overhead, variant)}

    def tokens(self, message: Message) -> int:
        """How long ``message`` is, roughly, with what the template adds."""
        if isinstance(message, Made):
            return message.tokens
        return round(self.per_message + letters(message.message) / _LETTERS_PER_WORD * self.per_word)


def letters(value: object) -> int:
    """How much text there is in a message, or a part of one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(letters(member) for name, member in value.items() if name not in ("role", "type", "id"))
    return sum(letters(member) for member in value) if isinstance(value, list) else 0


def estimated_tokens(message: Json) -> int:
    """Length of a recorded answer, from its letters alone: four of them are about a token."""
    return max(1, letters(message) // 4)

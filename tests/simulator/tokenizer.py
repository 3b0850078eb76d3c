"""A tokenizer in which text and tokens are not one-to-one.

Ids 0-255 are bytes, then come special tokens, then pieces. `encode` takes the longest piece at
each place, but a model may also *generate* a word in two halves. Such an answer, sent back as
text, is encoded to other ids than those that were generated, as happens with real tokenizers.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|image|>",
)
IM_START, EOS, THINK, END_THINK, TOOL_CALL, END_TOOL_CALL, IMAGE = range(256, 256 + len(SPECIALS))

_LATER_TEXT = """
river mountain garden window letter summer winter morning evening harbour island bridge forest
valley meadow castle village market station engine journey lantern compass feather marble copper
silver orange purple yellow golden gentle narrow broken hidden silent distant ancient modern little
travel wander follow gather listen remember whisper answer question reason number pattern measure
balance signal thunder shadow mirror candle basket blanket café naïve
"""
_FIRST_TEXT = """
Perhaps Certainly Usually Yesterday Tomorrow Somewhere Nothing Everyone Although Because Whenever
Morning Evening Harbour Mountain Garden
"""
_LATER, _FIRST = _LATER_TEXT.split(), _FIRST_TEXT.split()
_ROLES = ("system", "developer", "user", "assistant", "tool")

_FIRST_PIECE = 300


def _pieces() -> tuple[str, ...]:
    words = [*_FIRST, *(f" {word}" for word in _LATER)]
    halves = [half for word in words for half in (word[: len(word) // 2], word[len(word) // 2 :])]
    return tuple(dict.fromkeys([*_ROLES, *words, *halves]))


PIECES = _pieces()
_ID = {piece: _FIRST_PIECE + index for index, piece in enumerate(PIECES)}
_LONGEST = max(map(len, PIECES))
_SPECIAL_ID = {text: 256 + index for index, text in enumerate(SPECIALS)}
_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
VOCABULARY_SIZE = _FIRST_PIECE + len(PIECES)

FIRST_WORDS = tuple(_ID[word] for word in _FIRST)
"""Words that begin an answer: one token each, no leading space."""

LATER_WORDS = tuple(_ID[f" {word}"] for word in _LATER)
"""Words that follow another one: one token each, with their leading space."""


def is_special(token: int) -> bool:
    return 256 <= token < 256 + len(SPECIALS)


def halves(token: int) -> tuple[int, int]:
    """The two tokens a word may also be generated as; `encode` never gives them."""
    word = PIECES[token - _FIRST_PIECE]
    return _ID[word[: len(word) // 2]], _ID[word[len(word) // 2 :]]


def token_bytes(token: int) -> bytes:
    """What a token stands for; a special token stands for its own spelling."""
    if token < 256:
        return bytes((token,))
    if is_special(token):
        return SPECIALS[token - 256].encode()
    return PIECES[token - _FIRST_PIECE].encode()


def encode(text: str) -> list[int]:
    """The ids of a text, longest piece first; special tokens in the text are recognised."""
    ids: list[int] = []
    for part in _SPLIT.split(text):
        special = _SPECIAL_ID.get(part)
        if special is not None:
            ids.append(special)
        else:
            _encode_plain(part, ids)
    return ids


def _encode_plain(text: str, ids: list[int]) -> None:
    at = 0
    while at < len(text):
        for length in range(min(_LONGEST, len(text) - at), 0, -1):
            token = _ID.get(text[at : at + length])
            if token is not None:
                ids.append(token)
                at += length
                break
        else:
            ids.extend(text[at].encode("utf-8", "replace"))
            at += 1


def decode(ids: Iterable[int], *, skip_special: bool = True) -> str:
    kept = (token for token in ids if not (skip_special and is_special(token)))
    return b"".join(map(token_bytes, kept)).decode("utf-8", "replace")


class IncrementalDecoder:
    """Text token by token; half a character is held back until its other half comes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return "" if is_special(token) else self._decoder.decode(token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

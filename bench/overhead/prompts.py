"""What is asked, in bodies of an exact size, and the token ids that the engines make of it.

A turn that reuses is the second of its conversation: it repeats the first, the answer, and asks again. Both it and
a first turn have the size that is measured, to the byte.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

MODEL = "instant"
PIECE = 4
"""Characters a token: about what English has."""

ANSWER_PIECES = tuple(f" {number:03d}" for number in range(20))
"""The texts of an answer's tokens."""

MARK = b"bench-"
"""Begins the text by which an engine knows a request again without reading all of it; a full stop ends it."""

_VOCABULARY = 150_000
_ROLES = {"system": 1, "user": 2, "assistant": 3}
_END = 4
_SPECIAL = 10
_MESSAGE_BYTES = 4000
_SMALLEST = 1000

Message = dict[str, str]
Json = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request of a client."""

    body: bytes
    streams: bool
    mark: str
    tokens: int
    """Of the prompt."""
    members: Json


@dataclass(frozen=True)
class Asks:
    """The requests of one size."""

    first: Ask
    """A conversation's only turn."""
    opening: Ask
    """The turn before ``following``; a little smaller."""
    following: Ask


def token(piece: str) -> int:
    """The id of a piece of text."""
    return _SPECIAL + zlib.crc32(piece.encode()) % (_VOCABULARY - _SPECIAL)


def tokenise(messages: Sequence[Message]) -> list[int]:
    """A prompt's ids, as a chat template and a tokenizer would make them. An answer's tokens come out again as such."""
    ids: list[int] = []
    for message in messages:
        ids.append(_ROLES.get(message["role"], 0))
        content = message["content"]
        ids += [token(content[start : start + PIECE]) for start in range(0, len(content), PIECE)]
        ids.append(_END)
    return [*ids, _ROLES["assistant"]]


@cache
def asks(size: int, *, streams: bool) -> Asks:
    """Requests of ``size`` bytes. Raises ``ValueError`` for a size into which they do not fit."""
    if size < _SMALLEST:
        raise ValueError(f"a body has at least {_SMALLEST} bytes")
    mode = "s" if streams else "w"
    opening = _of_size(size, f"opening-{mode}", streams)
    grown = _grown(opening, f"following-{mode}", size)
    opening = _of_size(2 * size - len(grown.body), f"opening-{mode}", streams, named=size)
    return Asks(_of_size(size, f"first-{mode}", streams), opening, _grown(opening, f"following-{mode}", size))


def _ask(members: Json, mark: str) -> Ask:
    return Ask(msgspec.json.encode(members), members["stream"], mark, len(tokenise(members["messages"])), members)


def _of_size(size: int, name: str, streams: bool, named: int | None = None) -> Ask:
    """A first turn of ``size`` bytes, named for the size ``named``."""
    mark = f"{MARK.decode()}{named or size}-{name}."
    members: Json = {
        "model": MODEL,
        "user": mark,
        "messages": _messages(size // _MESSAGE_BYTES),
        "max_tokens": len(ANSWER_PIECES),
        "temperature": 0.7,
        "stream": streams,
    }
    missing = size - len(msgspec.json.encode(members))
    if missing < 0:
        members["messages"] = _messages(max(0, size // _MESSAGE_BYTES - 1))
        missing = size - len(msgspec.json.encode(members))
    members["messages"][-1]["content"] += _plain(missing)
    return _ask(members, mark)


def _grown(opening: Ask, name: str, named: int) -> Ask:
    mark = f"{MARK.decode()}{named}-{name}."
    asked = [{"role": "assistant", "content": "".join(ANSWER_PIECES)}, {"role": "user", "content": "And what then?"}]
    members = opening.members | {"user": mark, "messages": opening.members["messages"] + asked}
    return _ask(members, mark)


def _messages(count: int) -> list[Message]:
    """A system prompt, ``count`` messages of an agent's size, and a question."""
    chosen = random.Random(count)
    history = [{"role": ("user", "assistant")[number % 2], "content": _text(chosen)} for number in range(count)]
    system = {"role": "system", "content": "You are a helpful assistant."}
    return [system, *history, {"role": "user", "content": "Go on. "}]


def _text(chosen: random.Random) -> str:
    """Lines of words, of about a message's size in JSON: line ends and quotes are escaped there, as in code."""
    lines: list[str] = []
    size = 0
    while size < _MESSAGE_BYTES - 250:
        words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randint(2, 9))) for _ in range(9)]
        lines.append(f'    {" ".join(words[:6])} = "{" ".join(words[6:])}"')
        size += len(lines[-1]) + 4
    return "\n".join(lines)


def _plain(size: int) -> str:
    return ("abcdefg " * (size // 8 + 1))[:size]

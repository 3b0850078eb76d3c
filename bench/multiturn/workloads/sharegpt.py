"""A ShareGPT file: a JSON list of `{"conversations": [{"from": "human" | "gpt" | …, "value": "…"}, …]}`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec

from bench.failure import BenchFailure
from bench.multiturn.distribution import Distribution
from bench.multiturn.talk import Json, Talk
from bench.multiturn.workloads.recorded import recorded_talk

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}


class _Said(msgspec.Struct):
    who: str = msgspec.field(name="from")
    value: str


class _Entry(msgspec.Struct):
    conversations: list[_Said]


def sharegpt(path: Path, pause: Distribution, seed: int) -> list[Talk]:
    """All its conversations. What comes before the first question is left out. Raises ``BenchFailure``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BenchFailure(f"cannot read {path}: {error.strerror}") from error
    draw = random.Random(seed)
    return [
        talk
        for number, entry in enumerate(_entries(path, content), 1)
        if (talk := recorded_talk(_messages(path, number, entry), pause, draw)).turns
    ]


def _messages(path: Path, number: int, entry: _Entry) -> list[Json]:
    messages: list[Json] = []
    for said in entry.conversations:
        if (role := _ROLES.get(said.who)) is None:
            raise BenchFailure(f"{path}, entry {number}: nobody knows who {said.who!r} is; known: {', '.join(_ROLES)}")
        if role != "assistant" or any(message["role"] == "user" for message in messages):
            messages.append({"role": role, "content": said.value})
    return messages


def _entries(path: Path, content: bytes) -> list[_Entry]:
    try:
        return msgspec.json.decode(content, type=list[_Entry])
    except msgspec.ValidationError as error:
        raise BenchFailure(
            f"{path}: {error}; a list of {{'conversations': [{{'from', 'value'}}]}} is needed"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchFailure(f"{path}, line {_line(content)}: not JSON: {error}") from error


def _line(content: bytes) -> int:
    """Where it stops being JSON."""
    try:
        json.loads(content)
    except json.JSONDecodeError as error:
        return error.lineno
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 1

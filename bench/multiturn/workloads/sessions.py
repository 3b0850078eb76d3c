"""A folder of recorded agent sessions, as OpenAI messages in JSONL.

In a file `*.jsonl` either each line is a message, and the file is one session; or each line is
`{"messages": [...]}`, perhaps with `"tools"`, and is a session by itself.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from bench.failure import BenchFailure
from bench.multiturn.distribution import Distribution
from bench.multiturn.talk import Json, Talk
from bench.multiturn.workloads.lines import lines
from bench.multiturn.workloads.recorded import recorded_talk

_ROLES = ("system", "developer", "user", "assistant", "tool")


class _Session(msgspec.Struct):
    messages: list[Json]
    tools: list[Json] = []


def sessions(folder: Path, pause: Distribution, seed: int) -> list[Talk]:
    """All sessions, files by name. Raises ``BenchFailure``."""
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files:
        raise BenchFailure(f"{folder} is no folder with *.jsonl files")
    draw = random.Random(seed)
    talks = [
        recorded_talk(session.messages, pause, draw, session.tools) for file in files for session in _sessions(file)
    ]
    return [talk for talk in talks if talk.turns]


def _sessions(path: Path) -> list[_Session]:
    sessions: list[_Session] = []
    alone: list[Json] = []
    for number, line in lines(path, dict[str, Any]):
        where = f"{path}, line {number}"
        if "messages" in line:
            try:
                session = msgspec.convert(line, _Session)
            except msgspec.ValidationError as error:
                raise BenchFailure(f"{where}: {error}") from error
            for message in session.messages:
                _check(where, message)
            sessions.append(session)
        else:
            _check(where, line)
            alone.append(line)
    if sessions and alone:
        raise BenchFailure(f"{path}: some lines are messages and some are sessions; one of the two is needed")
    return sessions or [_Session(alone)]


def _check(where: str, message: Json) -> None:
    if message.get("role") not in _ROLES:
        raise BenchFailure(f"{where}: a message's role is one of {', '.join(_ROLES)}, not {message.get('role')!r}")
    if not isinstance(message.get("content"), str | list | None):
        raise BenchFailure(f"{where}: a message's content is text, or a list of parts")

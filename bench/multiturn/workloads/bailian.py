"""A Qwen-Bailian trace: JSONL of `chat_id`, `parent_chat_id` (-1: none), `timestamp` (s), `input_length`,
`output_length`, `type`, `turn`, `hash_ids` of 16-token blocks. The parents tell the conversations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.failure import BenchFailure
from bench.multiturn.talk import Talk
from bench.multiturn.workloads.lines import lines
from bench.multiturn.workloads.trace import Length, Request, packed, talk_of

BLOCK = 16


class _Line(msgspec.Struct):
    chat_id: int
    timestamp: float
    input_length: Length
    output_length: Length
    parent_chat_id: int = -1
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class _Chat:
    identity: int
    parent: int
    request: Request


def bailian(path: Path, time_scale: float) -> Iterator[Talk]:
    """Its conversations, in the order in which they began.

    One whose parent is not in the file begins with its whole prompt; of two with the same parent, so does the
    second. Raises ``BenchFailure``.
    """
    found: list[list[Request]] = []
    ending_with: dict[int, list[Request]] = {}
    for chat in sorted(_chats(path), key=lambda chat: chat.request.at):
        talk = ending_with.pop(chat.parent, None)
        if talk is None:
            talk = []
            found.append(talk)
        talk.append(chat.request)
        ending_with[chat.identity] = talk
    for requests in found:
        yield talk_of(requests, BLOCK, time_scale)


def _chats(path: Path) -> Iterator[_Chat]:
    seen: set[int] = set()
    for number, line in lines(path, _Line):
        if line.chat_id in seen:
            raise BenchFailure(f"{path}, line {number}: chat_id {line.chat_id} was there before")
        seen.add(line.chat_id)
        request = Request(line.timestamp, line.input_length, line.output_length, packed(line.hash_ids))
        yield _Chat(line.chat_id, line.parent_chat_id, request)

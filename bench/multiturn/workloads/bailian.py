"""A Qwen-Bailian trace: JSONL of `chat_id`, `parent_chat_id` (-1: none), `timestamp` (s), `input_length`,
`output_length`, `type`, `turn`, `hash_ids` of 16-token blocks. The parents tell the conversations.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.failure import BenchFailure
from bench.multiturn.talk import Talk
from bench.multiturn.workloads.lines import lines
from bench.multiturn.workloads.trace import Length, Request, talk_of

BLOCK = 16


class _Line(msgspec.Struct):
    chat_id: int
    timestamp: float
    input_length: Length
    output_length: Length
    parent_chat_id: int = -1
    hash_ids: list[int] = []


def bailian(path: Path, time_scale: float) -> list[Talk]:
    """Its conversations, in the order in which they began.

    One whose parent is not in the file begins with its whole prompt; of two with the same parent, so does the
    second. Raises ``BenchFailure``.
    """
    read = list(lines(path, _Line))
    seen: set[int] = set()
    for number, line in read:
        if line.chat_id in seen:
            raise BenchFailure(f"{path}, line {number}: chat_id {line.chat_id} was there before")
        seen.add(line.chat_id)
    found: list[list[Request]] = []
    ending_with: dict[int, list[Request]] = {}
    for _, line in sorted(read, key=lambda numbered: numbered[1].timestamp):
        talk = ending_with.pop(line.parent_chat_id, None)
        if talk is None:
            talk = []
            found.append(talk)
        talk.append(Request(line.timestamp, line.input_length, line.output_length, tuple(line.hash_ids)))
        ending_with[line.chat_id] = talk
    return [talk_of(requests, BLOCK, time_scale) for requests in found]

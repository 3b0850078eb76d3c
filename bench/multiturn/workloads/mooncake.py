"""A Mooncake trace: JSONL of `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.

It does not say which requests are one conversation. Their prompts do: a block's id stands for the block and all
before it, so a request whose ids begin with all full blocks of an earlier one goes on from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench.multiturn.talk import Talk
from bench.multiturn.workloads.lines import lines
from bench.multiturn.workloads.trace import Length, Request, packed, talk_of

BLOCK = 512
MOST_FOLLOWERS = 8
"""Different blocks after one that is a single conversation's: each prompt that ends within the next block gives it
another id. A system prompt that many share is followed by many more."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Length
    output_length: Length
    hash_ids: list[int]


def mooncake(path: Path, time_scale: float) -> Iterator[Talk]:
    """The conversations that can be told, in the order in which they began. Raises ``BenchFailure``."""
    requests = [
        Request(line.timestamp / 1000, line.input_length, line.output_length, packed(line.hash_ids))
        for _, line in lines(path, _Line)
    ]
    for found in conversations(sorted(requests, key=lambda one: one.at)):
        yield talk_of(found, BLOCK, time_scale)


def conversations(requests: Sequence[Request]) -> list[list[Request]]:
    """``requests``, in the order of time, by conversation.

    One goes on from the latest request of which it has all full blocks, and whose answer fits into it. A block that
    more than ``MOST_FOLLOWERS`` different ones follow is a prompt that many share, and proves nothing. Of two that
    go on from the same request the second is a conversation of its own.
    """
    followers: defaultdict[int, set[int]] = defaultdict(set)
    for request in requests:
        for block, following in zip(request.blocks, request.blocks[1:], strict=False):
            followers[block].add(following)
    found: list[list[Request]] = []
    ended_by: dict[int, list[Request]] = {}
    for request in requests:
        talk = _continued(request, ended_by)
        if talk is None:
            talk = []
            found.append(talk)
        else:
            del ended_by[_last_full(talk[-1])]
        talk.append(request)
        last = _last_full(request)
        if last >= 0 and len(followers[last]) <= MOST_FOLLOWERS:
            ended_by[last] = talk
    return found


def _continued(request: Request, ended_by: dict[int, list[Request]]) -> list[Request] | None:
    for count in range(len(request.blocks), 0, -1):
        talk = ended_by.get(request.blocks[count - 1])
        if talk is None:
            continue
        last = talk[-1]
        whole = last.input // BLOCK
        if last.blocks[:whole] == request.blocks[:whole] and request.input >= last.input + last.output:
            return talk
    return None


def _last_full(request: Request) -> int:
    """Id of the last block that the prompt fills; -1 if there is none."""
    whole = min(request.input // BLOCK, len(request.blocks))
    return request.blocks[whole - 1] if whole else -1

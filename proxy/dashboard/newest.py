"""The newest turns, of all processes of this router."""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from proxy.background import end
from proxy.call import Report

NEWEST = 50
"""So many turns each process keeps, and so many are shown."""

_WRITE_EVERY_SECONDS = 1.0
_MOST_FILES = 64
"""Processes that died leave theirs."""


class ToldTurn(msgspec.Struct, frozen=True, gc=False):
    """One turn that is over: what its log line tells, without the request's id."""

    at: float
    """Of its end; seconds since the epoch."""
    endpoint: str
    conversation: str
    """The beginning of the conversation's key, which is a keyed hash; empty if the request named none."""
    turn: int
    outcome: str
    reason: str
    status: int
    prompt_tokens: int | None
    reused_tokens: int
    ttft_seconds: float | None
    seconds: float
    prefill: str
    decode: str


def told_turn(report: Report, endpoint: str, ttft_seconds: float | None, seconds: float) -> ToldTurn:
    """What is shown of a turn that has just ended."""
    return ToldTurn(
        at=time.time(),
        endpoint=endpoint,
        conversation=report.conversation,
        turn=report.turn,
        outcome=report.outcome or "",
        reason=report.reason or "",
        status=report.status,
        prompt_tokens=report.prompt_tokens,
        reused_tokens=report.reused_tokens,
        ttft_seconds=ttft_seconds,
        seconds=seconds,
        prefill=report.prefill,
        decode=report.decode,
    )


class Newest:
    """Keeps this process's newest turns, and shows them to the other processes through files in a folder.

    Files, since these processes share nothing but a socket and that folder, in which their metrics meet too.
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder`` is None for a process that is the only one."""
        self._turns: deque[ToldTurn] = deque(maxlen=NEWEST)
        self._folder = folder
        self._written: ToldTurn | None = None
        self._writing: asyncio.Task[None] | None = None

    def add(self, turn: ToldTurn) -> None:
        """A turn is over."""
        self._turns.append(turn)

    def start(self) -> None:
        """Begin to show them to others, at most once a second, and only what is new."""
        if self._folder is not None:
            self._writing = asyncio.create_task(self._write_on(self._folder))

    async def stop(self) -> None:
        """What is not written is lost to the others."""
        await end(self._writing)

    async def all(self) -> list[ToldTurn]:
        """The newest turns of all processes, the newest first."""
        turns: Iterable[ToldTurn] = tuple(self._turns)
        if self._folder is not None:
            turns = [*turns, *await asyncio.to_thread(_others, self._folder, _name())]
        return sorted(turns, key=lambda turn: turn.at, reverse=True)[:NEWEST]

    async def _write_on(self, folder: Path) -> None:
        while True:
            await asyncio.sleep(_WRITE_EVERY_SECONDS)
            turns = tuple(self._turns)
            if turns and turns[-1] is not self._written:
                self._written = turns[-1]
                # A full disk costs the others' page these turns, and is told of by what matters more.
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(_write, folder / _name(), turns)


def _name() -> str:
    return f"newest-{os.getpid()}.json"


def _write(path: Path, turns: tuple[ToldTurn, ...]) -> None:
    # Renamed at the end: a reader sees all of it or what was there before.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.encode(turns))
    unfinished.replace(path)


def _others(folder: Path, own: str) -> list[ToldTurn]:
    found = []
    for path in folder.glob("newest-*.json"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    turns: list[ToldTurn] = []
    for _, path in sorted(found, reverse=True)[:_MOST_FILES]:
        if path.name != own:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                turns += _turns.decode(path.read_bytes())
    return turns


_turns = msgspec.json.Decoder(list[ToldTurn])

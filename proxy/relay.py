"""Decode's stream on its way to the client: each event the moment it arrives."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec

from proxy.background import Background
from proxy.body import NotAnObject, parse, read
from proxy.errors import broken_off
from proxy.harvest import Harvest
from proxy.sse import Events, data_of, is_end, with_data
from proxy.usual_chunk import is_opening
from proxy.worker_stream import BrokenOff

Finish = Callable[[], Coroutine[object, None, None]]

_READ_OUT_SECONDS = 1.0


def cleaned(event: bytes, harvest: Harvest) -> bytes | None:
    """``event`` without what is private; None if nothing is left of it."""
    if (opening := harvest.take_opening(event)) is not None:
        return opening
    data = data_of(event)
    if not data:
        return event
    kept = harvest.take(data)
    if kept is data:
        return event
    return None if kept is None else with_data(event, kept)


def names_role_only(event: bytes) -> bool:
    """Whether this is the chunk with which a chat begins, before any token: a role and no text."""
    if is_opening(event):
        return True
    if b'"role"' not in event:
        return False
    try:
        choices = read(parse(data_of(event)), "choices", list[_Opening])
    except NotAnObject:
        return False
    return bool(choices) and all(choice.says_nothing() for choice in choices or [])


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, msgspec.Raw]] | None = None


class _Opening(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None

    def says_nothing(self) -> bool:
        delta = self.delta
        if delta is None or self.finish_reason is not None:
            return False
        return not (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class Relay:
    """One stream, from decode to the client."""

    def __init__(
        self,
        begun: bytes,
        following: Events,
        harvest: Harvest,
        finish: Finish,
        is_over: Callable[[], bool],
        background: Background,
    ) -> None:
        """``begun`` are the events that were read already, ``following`` brings the others.

        ``finish`` is done once, when all was learned that the stream tells, and before the client is told its end,
        so that a client which goes on at once finds its entry. ``is_over`` tells whether the worker's answer ended.
        """
        self._begun = begun
        self._following = following
        self._harvest = harvest
        self._finish = finish
        self._is_over = is_over
        self._background = background
        self._finishing: asyncio.Task[None] | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        """What the client gets: everything, the moment it comes, without what is private.

        A stream that breaks off ends with an error event and without the API's end, never as if complete.
        """
        try:
            arrived = self._begun or await self._following.arrived()
            while arrived:
                told, ended = self._cleaned(arrived)
                if told:
                    asked = time.monotonic()
                    yield told
                    # A client that reads slowly makes decode's end look later than it was.
                    self._harvest.held_up += time.monotonic() - asked
                if ended is not None:
                    # A client that leaves now must not keep its entry from being stored.
                    await asyncio.shield(self._settle())
                    yield ended
                    await self._read_out()
                    return
                arrived = await self._following.arrived()
        except BrokenOff as error:
            detail = str(error)
        else:
            detail = "the worker closed the stream before its end"
        self._harvest.failed = True
        yield broken_off(detail).event()

    def left(self) -> None:
        """The client is gone, or all was sent. What decode retained by then is remembered either way."""
        if self._harvest.complete:
            self._settle()

    def _settle(self) -> asyncio.Task[None]:
        if self._finishing is None:
            self._finishing = self._background.start(self._finish())
        return self._finishing

    async def _read_out(self) -> None:
        """To the end of the connection's answer, so that it can be used again."""
        if self._is_over():
            return
        with contextlib.suppress(BrokenOff, TimeoutError):
            async with asyncio.timeout(_READ_OUT_SECONDS):
                while await self._following.arrived():
                    pass

    def _cleaned(self, arrived: bytes) -> tuple[bytes, bytes | None]:
        """What of it the client gets, and the API's end if that is among it: nothing counts after that."""
        harvest = self._harvest
        told: list[bytes] = []
        for event, usual in harvest.take_usual(arrived):
            if usual is not None:
                told.append(usual)
            elif is_end(event):
                return b"".join(told), event
            elif (kept := cleaned(event, harvest)) is not None:
                told.append(kept)
        return b"".join(told), None

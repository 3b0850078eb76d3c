"""Decode's stream on its way to the client: each event the moment it arrives."""

import time
from collections.abc import Callable, Coroutine

import msgspec

from proxy.background import Background
from proxy.body import NotAnObject, parse, read
from proxy.errors import broken_off
from proxy.harvest import Harvest
from proxy.interruption import Interruption
from proxy.sse import Events, data_of, is_end, with_data
from proxy.usual_chunk import is_opening
from proxy.worker_stream import BrokenOff, Stream

Finish = Callable[[], Coroutine[object, None, None]]


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
        stream: Stream,
        following: Events,
        harvest: Harvest,
        finish: Finish,
        interruption: Interruption,
        background: Background,
    ) -> None:
        """``following`` brings the events of ``stream``.

        ``finish`` is done once, when all was learned that the stream tells, and before the client is told its end,
        so that a client which goes on at once finds its entry.
        """
        self.over = False
        """Whether nothing follows what ``next`` gave."""
        self._stream = stream
        self._following = following
        self._harvest = harvest
        self._finish = finish
        self._interruption = interruption
        self._background = background
        self._told_at: float | None = None
        self._end = b""
        self._settled = False

    async def next(self) -> bytes:
        """What the client gets next, until ``over``: everything, the moment it comes, without what is private.

        A stream that breaks off ends with an error event and without the API's end, never as if complete.
        """
        self._client_read()
        try:
            while not self._end and (arrived := await self._following.arrived()):
                told, self._end = self._cleaned(arrived)
                if told:
                    self._told_at = time.monotonic()
                    return told
        except BrokenOff as error:
            return self._broken_off(str(error))
        if not self._end:
            return self._broken_off("the worker closed the stream before its end")
        if not self._settled:
            self._settled = True
            # A client that leaves now must not keep its entry from being stored.
            await self._interruption.uncut(self._finish())
        self.over = True
        return self._end

    def left(self) -> None:
        """The client is gone, or all was sent. What decode retained by then is remembered either way."""
        if not self._end and not self.over:
            # Decode may have come to its end, and keep its blocks, while the client was slow.
            self._client_read()
            _, self._end = self._cleaned(self._following.unread(self._stream.unread()))
        if self._harvest.complete and not self._settled:
            self._settled = True
            self._background.start(self._finish())
        if self._end:
            self._stream.leave()
        else:
            self._stream.close()

    def _client_read(self) -> None:
        """A client that reads slowly makes decode's end look later than it was."""
        if self._told_at is not None:
            self._harvest.held_up += time.monotonic() - self._told_at
            self._told_at = None

    def _broken_off(self, detail: str) -> bytes:
        self._harvest.failed = True
        self.over = True
        return broken_off(detail).event()

    def _cleaned(self, arrived: bytes) -> tuple[bytes, bytes]:
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
        return b"".join(told), b""

"""One connection to a worker: one request at a time, and its answer."""

import asyncio
from enum import IntEnum
from typing import Protocol, cast

from proxy.http_answer import HttpAnswer

_MOST_WAITING = 2**20
"""Bytes of a stream that may wait for their reader before the worker is made to wait."""


class Until(IntEnum):
    """What of an answer is waited for."""

    HEAD = 0
    PART = 1
    """Of the body, the next one."""
    END = 2


class Keeper(Protocol):
    """Whose connections these are."""

    def free(self, connection: "WorkerConnection") -> None:
        """It can carry another request."""

    def lost(self, connection: "WorkerConnection") -> None:
        """It is gone, and will not be free again."""


class WorkerConnection(asyncio.Protocol):
    """A connection. Whoever asked waits for ``more`` as long as its answer is neither over nor broken.

    When an answer is over the connection is its keeper's again, whether or not the body was taken; or it is closed, if
    it cannot carry another request.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.idle_since = 0.0
        """For its keeper; seconds of the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._keeper = keeper
        self._transport: asyncio.Transport | None = None
        self._answer: HttpAnswer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._until = Until.HEAD
        self._paused = False

    @property
    def usable(self) -> bool:
        """Whether it can carry a request, as far as is known here."""
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    def ask(self, head: bytes, body: bytes) -> HttpAnswer:
        """Send a request; the answer, of which nothing is there yet."""
        if self._transport is None or self._answer is not None:
            raise RuntimeError("a connection carries one request at a time")
        self._answer = answer = HttpAnswer()
        self._until = Until.HEAD
        # Not put together: a body may be large.
        self._transport.writelines((head, body) if body else (head,))
        return answer

    def more(self, until: Until) -> asyncio.Future[None]:
        """Done when there is that much of the answer, or it is over or broken, or ``wake`` was called.

        Once somebody waits for ``END``, the answer may be of any size; else a worker that is faster than its reader is
        made to wait.
        """
        self._until = until
        if self._paused and until is Until.END:
            self._resume()
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def take(self, answer: HttpAnswer) -> bytes:
        """What came of its body since it was last taken."""
        taken = answer.take()
        if self._paused and self._answer is answer:
            self._resume()
        return taken

    def wake(self) -> None:
        """Let whoever waits look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def drop(self, answer: HttpAnswer) -> None:
        """Close the connection, so that the worker stops; nothing if the answer is over or broken anyway."""
        if self._answer is answer:
            answer.fail("given up")
            self._let_go()

    def close(self) -> None:
        """Close it, whatever it carries."""
        if self._answer is not None:
            self._answer.fail("given up")
        self._let_go()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        answer = self._answer
        if answer is None:
            # Nobody asked: what this belongs to is not known, nor what would come after it.
            self.close()
            return
        answer.feed(data)
        if answer.over:
            self._end(answer)
        elif answer.broken:
            self._let_go()
        elif self._until is Until.PART:
            if answer.waiting:
                self.wake()
                self._hold_back(answer)
        elif self._until is Until.HEAD and answer.status:
            self.wake()
            self._hold_back(answer)

    def eof_received(self) -> None:
        """See ``asyncio.Protocol``: the transport closes itself."""
        answer = self._answer
        if answer is not None:
            answer.end()
            if answer.over:
                self._end(answer)
            else:
                self._let_go()

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        if self._answer is not None:
            self._answer.lost("lost" if error is None else f"lost, {type(error).__name__}")
            self._let_go()
        self._keeper.lost(self)

    def _hold_back(self, answer: HttpAnswer) -> None:
        if answer.waiting > _MOST_WAITING and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self, answer: HttpAnswer) -> None:
        transport = self._transport
        assert transport is not None
        self._answer = None
        if self._paused:
            self._resume()
        # One that answered before it had read the request will take the rest of it for another.
        if answer.reusable and not transport.is_closing() and not transport.get_write_buffer_size():
            self._keeper.free(self)
        else:
            transport.abort()
        self.wake()

    def _let_go(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()
        self.wake()

"""A worker's answer that comes in parts, as it is read."""

import asyncio

from proxy.gap import GapWatch
from proxy.http_answer import HttpAnswer
from proxy.worker_connection import Until, WorkerConnection

_END_SECONDS = 1.0
"""For an answer's end, after the last of it that matters."""


class BrokenOff(Exception):
    """A stream ended before its end: connection lost, or nothing came for too long."""


class Stream:
    """An answer that comes in parts. Must be closed, or left at its end; closing it early makes the engine stop."""

    def __init__(
        self, connection: WorkerConnection, answer: HttpAnswer, gap_timeout: float, others: set["Stream"]
    ) -> None:
        """``answer``, whose head is there, comes on ``connection``. ``gap_timeout``: seconds.

        ``others`` are all open streams of the worker, this one among them until closed.
        """
        self.begun = asyncio.get_running_loop().time()
        self.status = answer.status
        self.content_type = answer.content_type
        self._connection = connection
        self._answer = answer
        self._stalled = False
        self._gap = GapWatch(gap_timeout, self._stall)
        self._others = others
        others.add(self)

    def allow_gaps(self, seconds: float) -> None:
        """From now on there may be so many seconds between two parts."""
        self._gap.allow(seconds)

    async def next(self) -> bytes:
        """The bytes that arrived since, once there are some; nothing at the end. Raises ``BrokenOff``."""
        connection, answer, gap = self._connection, self._answer, self._gap
        while not answer.waiting:
            if answer.over:
                return b""
            if self._stalled:
                raise BrokenOff(f"the worker sent nothing for {gap.seconds:g} s")
            if answer.broken:
                raise BrokenOff(f"the worker's connection broke: {answer.broken}")
            gap.begin()
            try:
                await connection.more(Until.PART)
            finally:
                gap.end()
        return connection.take(answer)

    def unread(self) -> bytes:
        """What arrived and was not asked for yet."""
        return self._connection.take(self._answer)

    def leave(self) -> None:
        """All that matters was read. What is left, the answer's end, is read in passing, so that the connection can be
        used again; if it does not come soon, the connection is closed."""
        self._gap.stop()
        self._others.discard(self)
        if not self._answer.over:
            asyncio.get_running_loop().call_later(_END_SECONDS, self._connection.drop, self._answer)

    def close(self) -> None:
        """Close the connection, unless the answer is over: it serves others then."""
        self._gap.stop()
        self._others.discard(self)
        self._connection.drop(self._answer)

    def _stall(self) -> None:
        # Whoever waits for a part is told by the connection's end.
        self._stalled = True
        self._connection.drop(self._answer)

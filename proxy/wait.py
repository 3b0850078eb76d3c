"""A wait for a server, which may be ended from elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from proxy.worker_connection import WorkerConnection


class Wait:
    """Bounded in time, and one of ``others`` while it lasts: first for a connection, then on one.

    Whoever waits on a connection is woken when the time is over, and looks whether it is.
    """

    __slots__ = ("_connecting", "_loop", "_others", "_timer", "begun", "on", "over", "seconds")

    def __init__(self, seconds: float, others: set["Wait"]) -> None:
        self.seconds = seconds
        """How long it may take."""
        self.on: WorkerConnection | None = None
        """Where it waits."""
        self.over = seconds <= 0
        """Whether it takes too long, or was stopped."""
        self._loop = asyncio.get_running_loop()
        self.begun = self._loop.time()
        self._timer = self._loop.call_later(seconds, self.stop)
        self._connecting: asyncio.Timeout | None = None
        self._others = others
        others.add(self)

    def stop(self) -> None:
        """The time is over now."""
        self.over = True
        if self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(self._loop.time())
        elif self.on is not None:
            self.on.wake()

    def go_on(self, seconds: float) -> None:
        """From now on it may take so many seconds more."""
        self._timer.cancel()
        self.seconds = seconds
        self._timer = self._loop.call_later(seconds, self.stop)

    @asynccontextmanager
    async def connecting(self) -> AsyncIterator[None]:
        """What is done within is given up when the time is over: ``TimeoutError`` is raised."""
        try:
            async with asyncio.timeout(None) as self._connecting:
                if self.over:
                    self._connecting.reschedule(self._loop.time())
                yield
        finally:
            self._connecting = None

    def __enter__(self) -> "Wait":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._others.discard(self)

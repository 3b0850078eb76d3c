"""Bounds each of many waits, one after the other, at the cost of one timer for all of them."""

import asyncio
from collections.abc import Callable


class GapWatch:
    """Tells when a wait takes too long. What lies between two waits does not count."""

    def __init__(self, seconds: float, stalled: Callable[[], None]) -> None:
        """``stalled`` is called, once, when a wait has taken ``seconds``. On the running loop."""
        self._loop = asyncio.get_running_loop()
        self._stalled = stalled
        self._since: float | None = None
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        """None as long as nobody waited, and again when nobody did for a while."""

    @property
    def seconds(self) -> float:
        """How long a wait may take."""
        return self._seconds

    def allow(self, seconds: float) -> None:
        """From now on a wait may take ``seconds``."""
        self._seconds = seconds
        self.stop()
        if self._since is not None:
            self._timer = self._loop.call_at(self._since + seconds, self._look)

    def begin(self) -> None:
        """A wait begins."""
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._seconds, self._look)

    def end(self) -> None:
        """It is over."""
        self._since = None

    def stop(self) -> None:
        """No wait will follow, for now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        due = self._since + self._seconds
        if due <= self._loop.time():
            self._stalled()
        else:
            self._timer = self._loop.call_at(due, self._look)

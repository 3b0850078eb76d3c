"""What ends a turn before its time, and the moments in which nothing may."""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from types import TracebackType
from typing import TypeVar

_Result = TypeVar("_Result")


class Cause(Enum):
    """Why a turn is to end."""

    CLIENT_LEFT = "client left"
    TIME_IS_OVER = "time is over"


class Interruption:
    """Cancels the task that entered it, once, when its client leaves or its time is over.

    One object for all that may end a turn. Nothing that must not be cut needs a task and a shield of its own: with a
    store in memory those cost more than what they are around.
    """

    def __init__(self, seconds: float) -> None:
        """The turn has so many seconds, from when this is entered."""
        self.cause: Cause | None = None
        """Why the turn was interrupted; None until then."""
        self._seconds = seconds
        self._uncut = 0
        self._due = False

    def __enter__(self) -> "Interruption":
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a turn is served by a task")
        self._task = task
        self._loop = task.get_loop()
        self._timer = self._loop.call_later(self._seconds, self.interrupt, Cause.TIME_IS_OVER)
        self._over = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._timer.cancel()

    def interrupt(self, cause: Cause) -> None:
        """End the turn. Only the first call counts, and none when it is over."""
        if self.cause is not None or self._over:
            return
        self.cause = cause
        if self._uncut:
            self._due = True
        else:
            self._task.cancel()

    def shorten(self, deadline: float) -> None:
        """The time is over at ``deadline``, of the loop's clock, if not before."""
        if deadline < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self.interrupt, Cause.TIME_IS_OVER)

    async def uncut(self, work: Coroutine[object, None, _Result]) -> _Result:
        """What comes of ``work``, which is not interrupted; if there was reason to, the next wait after it is."""
        if self.cause is not None and not self._uncut:
            try:
                await self.checkpoint()
            except asyncio.CancelledError:
                # It was on its way, and waited for a moment in which it can be raised.
                if self._task.uncancel():
                    work.close()
                    raise
                self._due = True
        self._uncut += 1
        try:
            return await work
        finally:
            self._uncut -= 1
            if self._due and not self._uncut:
                self._due = False
                self._task.cancel()

    async def checkpoint(self) -> None:
        """Where nothing else may wait: a moment in which an interruption can be raised that is on its way."""
        if self.cause is not None:
            await asyncio.sleep(0)

    def was_it(self) -> bool:
        """Asked when the task's cancellation arrives: whether it is this one, and nobody else's on top of it."""
        return self.cause is not None and not self._due and not self._task.uncancel()

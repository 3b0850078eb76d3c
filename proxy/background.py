"""Work that outlives the request it came from."""

import asyncio
from collections.abc import Coroutine

import structlog

log = structlog.get_logger()

_ASK_AGAIN_SECONDS = 0.1


class Background:
    """Tasks that nobody waits for, kept until they end; what they raise is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        """Begin ``work``; its task, for who wants to wait all the same."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for what is under way, then cancel it."""
        if self._running:
            await asyncio.wait(self._running, timeout=patience)
        for task in list(self._running):
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background failed", exc_info=error)


async def end(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task that watches over something, and return when it has ended.

    Asked again until it has: a cancellation that comes while a connection breaks may be taken for its time-out, by
    the library that was waiting.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_ASK_AGAIN_SECONDS)

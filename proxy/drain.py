"""The end of this process: no new turns, and a time by which the running ones are over."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """What the server begins when it is told to end, and the endpoints obey."""

    def __init__(self) -> None:
        self.began = False
        self._deadline = 0.0
        self._limits: set[asyncio.Timeout] = set()
        self._hooks: list[Callable[[], None]] = []

    @property
    def running(self) -> int:
        """Turns that are not over."""
        return len(self._limits)

    @property
    def left(self) -> float:
        """Seconds that the running turns still have."""
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def when_it_begins(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called, once, by ``begin``."""
        self._hooks.append(hook)

    def begin(self, seconds: float) -> None:
        """From now on no turn begins; those that run have ``seconds`` left. Only the first call counts."""
        if self.began:
            return
        self.began = True
        self._deadline = asyncio.get_running_loop().time() + seconds
        for limit in self._limits:
            self._shorten(limit)
        for hook in self._hooks:
            hook()

    @contextmanager
    def turn(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Counts a running turn, whose time is ``limit``; it is shortened when the process is to end."""
        self._limits.add(limit)
        if self.began:
            self._shorten(limit)
        try:
            yield
        finally:
            self._limits.discard(limit)

    def _shorten(self, limit: asyncio.Timeout) -> None:
        when = limit.when()
        if not limit.expired() and (when is None or when > self._deadline):
            limit.reschedule(self._deadline)

"""Time that a test can move, so that leases and retention limits need no sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Seconds since some moment; runs by itself unless `frozen`, jumps with `advance`."""

    def __init__(self, *, frozen: bool = False) -> None:
        self._frozen = frozen
        self._offset = 1_000.0
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        return self._offset if self._frozen else self._offset + time.monotonic()

    def advance(self, seconds: float) -> None:
        """Move forward and let everyone who waits for a moment look again."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._offset += seconds
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

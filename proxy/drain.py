"""The end of this process: no new turns, and a time by which the running ones are over."""

import asyncio
from collections.abc import Callable

from proxy.interruption import Interruption


class Drain:
    """What the server begins when it is told to end, and the endpoints obey."""

    def __init__(self) -> None:
        self.began = False
        self._deadline = 0.0
        self._turns: set[Interruption] = set()
        self._hooks: list[Callable[[], None]] = []

    @property
    def running(self) -> int:
        """Turns that are not over."""
        return len(self._turns)

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
        for turn in self._turns:
            turn.shorten(self._deadline)
        for hook in self._hooks:
            hook()

    def enter(self, turn: Interruption) -> None:
        """A turn runs from now on; its time is shortened when the process is to end."""
        self._turns.add(turn)
        if self.began:
            turn.shorten(self._deadline)

    def leave(self, turn: Interruption) -> None:
        """It is over."""
        self._turns.discard(turn)

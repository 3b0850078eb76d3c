"""The store in this process: nothing to install, nothing shared, gone with the process."""

import heapq
import time
from collections.abc import AsyncIterator, Callable

from metadata_store.base import LAST_TURN_SECONDS, TOMBSTONE_SECONDS, Absent
from metadata_store.record import Holding, LastTurn, Put, Record


class MemoryStore:
    """Holds an entry until it is taken or its deadline has come, then a note that it had been there."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._entries: dict[str, Record] = {}
        self._deadlines: dict[str, float] = {}
        """Of the last entry stored, whether taken or not: what tells "expired" from "never there"."""
        self._due: list[tuple[float, str]] = []
        """Heap of when to look at a key again, so that no call has to walk through all entries."""
        self._last_turns: dict[str, LastTurn] = {}
        """The longest ago first."""

    async def open(self) -> None:
        """Nothing to make ready."""

    async def close(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._deadlines.clear()
        self._due.clear()
        self._last_turns.clear()

    async def take(self, key: str) -> Record | Absent:
        """See ``Store.take``."""
        now = self._sweep()
        deadline = self._deadlines.pop(key, None)
        if (record := self._entries.pop(key, None)) is not None:
            return record
        return Absent.EXPIRED if deadline is not None and deadline <= now else Absent.NOTHING

    async def put(self, key: str, record: Record) -> Put:
        """See ``Store.put``."""
        self._sweep()
        displaced = self._entries.get(key)
        self._keep(key, record)
        return Put(displaced, await self.note_turn(key, LastTurn.of(record)))

    async def note_turn(self, key: str, last: LastTurn) -> LastTurn | None:
        """See ``Store.note_turn``."""
        self._sweep()
        before = self._last_turns.pop(key, None)
        self._last_turns[key] = last
        return before

    async def restore(self, key: str, record: Record) -> bool:
        """See ``Store.restore``."""
        if self._sweep() >= record.deadline or key in self._entries:
            return False
        self._keep(key, record)
        return True

    async def discard(self, key: str) -> Record | None:
        """See ``Store.discard``."""
        self._sweep()
        self._deadlines.pop(key, None)
        self._last_turns.pop(key, None)
        return self._entries.pop(key, None)

    async def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """See ``Store.scan``."""
        self._sweep()
        for key, record in list(self._entries.items()):
            yield key, Holding.of(record)

    def _keep(self, key: str, record: Record) -> None:
        self._entries[key] = record
        self._deadlines[key] = record.deadline
        heapq.heappush(self._due, (record.deadline, key))

    def _sweep(self) -> float:
        """Drop what is past its deadline, and notes that nobody needs any more; the time now."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            deadline = self._deadlines.get(key)
            if deadline is None or deadline > now:
                continue
            self._entries.pop(key, None)
            if deadline + TOMBSTONE_SECONDS <= now:
                del self._deadlines[key]
            else:
                heapq.heappush(self._due, (deadline + TOMBSTONE_SECONDS, key))
        while self._last_turns:
            oldest = next(iter(self._last_turns))
            if self._last_turns[oldest].ended_at + LAST_TURN_SECONDS > now:
                break
            del self._last_turns[oldest]
        return now

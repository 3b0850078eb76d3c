"""The store in this process: nothing to install, nothing shared, gone with the process."""

import heapq
import time
from collections.abc import AsyncIterator, Callable

from metadata_store.base import TOMBSTONE_SECONDS, Absent
from metadata_store.record import Holding, Record


class MemoryStore:
    """Holds an entry until it is taken or its deadline has come, then a note that it had been there."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._entries: dict[str, Record] = {}
        self._deadlines: dict[str, float] = {}
        """Of the last entry stored, whether taken or not: what tells "expired" from "never there"."""
        self._due: list[tuple[float, str]] = []
        """Heap of when to look at a key again, so that no call has to walk through all entries."""

    async def open(self) -> None:
        """Nothing to make ready."""

    async def close(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._deadlines.clear()
        self._due.clear()

    async def take(self, key: str) -> Record | Absent:
        """See ``Store.take``."""
        now = self._sweep()
        deadline = self._deadlines.pop(key, None)
        if (record := self._entries.pop(key, None)) is not None:
            return record
        return Absent.EXPIRED if deadline is not None and deadline <= now else Absent.NOTHING

    async def put(self, key: str, record: Record) -> Record | None:
        """See ``Store.put``."""
        self._sweep()
        displaced = self._entries.get(key)
        self._entries[key] = record
        self._deadlines[key] = record.deadline
        heapq.heappush(self._due, (record.deadline, key))
        return displaced

    async def restore(self, key: str, record: Record) -> bool:
        """See ``Store.restore``."""
        if self._sweep() >= record.deadline or key in self._entries:
            return False
        await self.put(key, record)
        return True

    async def discard(self, key: str) -> Record | None:
        """See ``Store.discard``."""
        self._sweep()
        self._deadlines.pop(key, None)
        return self._entries.pop(key, None)

    async def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """See ``Store.scan``."""
        self._sweep()
        for key, record in list(self._entries.items()):
            yield key, Holding.of(record)

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
        return now

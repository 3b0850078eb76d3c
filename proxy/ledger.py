"""What is retained at present, by all replicas, as far as this process knows."""

import heapq
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from metadata_store import Holding, StoreError


class Ledger:
    """Entries in short. Exact for what this process does, and as new as the last look for the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, Holding] = {}
        self._by_worker: defaultdict[str, dict[str, Holding]] = defaultdict(dict)
        self._blocks: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By worker and generation: every turn asks, and there may be thousands of entries."""
        self._due: list[tuple[float, str]] = []
        """Heap of deadlines, those of entries that are gone among them."""
        self._looks: list[set[str]] = []
        """Of each look under way: what was stored or is gone since it began."""

    def stored(self, key: str, holding: Holding) -> None:
        """An entry was put."""
        self.gone(key)
        self._entries[key] = holding
        self._by_worker[holding.worker][key] = holding
        self._blocks[holding.worker, holding.generation] += holding.blocks
        heapq.heappush(self._due, (holding.deadline, key))

    def gone(self, key: str) -> None:
        """An entry was taken or discarded."""
        for touched in self._looks:
            touched.add(key)
        holding = self._entries.pop(key, None)
        if holding is not None:
            self._by_worker[holding.worker].pop(key, None)
            self._blocks[holding.worker, holding.generation] -= holding.blocks

    def blocks_on(self, worker: str, generation: str | None) -> int:
        """How many blocks one start of a worker keeps for entries."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            if (holding := self._entries.get(key)) is not None and holding.deadline <= now:
                self.gone(key)
        return 0 if generation is None else self._blocks.get((worker, generation), 0)

    def find(self, key: str) -> Holding | None:
        """The entry under ``key``, if there is one and it has not expired."""
        holding = self._entries.get(key)
        return holding if holding is not None and holding.deadline > self._clock() else None

    def on(self, worker: str, generation: str | None) -> dict[str, Holding]:
        """What one start of a worker keeps, by key."""
        now = self._clock()
        return {
            key: holding
            for key, holding in self._by_worker[worker].items()
            if holding.generation == generation and holding.deadline > now
        }

    async def look(self, found: AsyncIterator[tuple[str, Holding]]) -> None:
        """Take over what a scan of the store finds. If the store fails, what was known stays."""
        touched: set[str] = set()
        self._looks.append(touched)
        try:
            seen = {key: holding async for key, holding in found}
        except StoreError:
            return
        finally:
            self._looks = [other for other in self._looks if other is not touched]
        # Of what this process stored or took meanwhile the scan may have seen an earlier state.
        known = {key: self._entries.get(key) for key in touched}
        self._entries = {}
        self._by_worker.clear()
        self._blocks.clear()
        self._due.clear()
        for key, holding in (seen | known).items():
            if holding is not None:
                self.stored(key, holding)

"""What is retained at present, by all replicas, as far as this process knows."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from metadata_store import Holding, StoreError


class Ledger:
    """Entries in short. Exact for what this process does, and as new as the last look for the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, Holding] = {}
        self._by_worker: defaultdict[str, dict[str, Holding]] = defaultdict(dict)

    def stored(self, key: str, holding: Holding) -> None:
        """An entry was put."""
        self.gone(key)
        self._entries[key] = holding
        self._by_worker[holding.worker][key] = holding

    def gone(self, key: str) -> None:
        """An entry was taken or discarded."""
        holding = self._entries.pop(key, None)
        if holding is not None:
            self._by_worker[holding.worker].pop(key, None)

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
        begun = self._clock()
        try:
            seen = {key: holding async for key, holding in found}
        except StoreError:
            return
        # What was stored meanwhile may have been missed.
        newer = {key: holding for key, holding in self._entries.items() if holding.stored_at >= begun}
        self._entries = {}
        self._by_worker.clear()
        for key, holding in (seen | newer).items():
            self.stored(key, holding)

"""The cache memory of one engine process, and what is kept in it after its request has ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .options import Options
from .retention import Held, Retention
from .sequence import Sequenced
from .storage import NULL_BLOCK, BlockPool

if TYPE_CHECKING:
    from .cluster import Cluster


class Memory:
    """Blocks, who holds them, and the moments at which some become free."""

    def __init__(self, cluster: Cluster, name: str, options: Options) -> None:
        self.pool = BlockPool(
            options.num_blocks,
            options.span,
            prefix_caching=options.prefix_caching,
            scrub=options.scrub_freed,
        )
        self.retentions: dict[str, Retention] = {}
        self._cluster = cluster
        self._name = name
        self._skew = random.uniform(-1e6, 1e6)
        self._changed = asyncio.Event()
        cluster.clock.on_advance(self.wake)

    def now(self) -> float:
        """The engine's private clock, which no other process can read."""
        return self._cluster.clock.now() + self._skew

    def release(self, seq: Sequenced) -> None:
        """Free all that a sequence holds; what it has computed is lost to it."""
        for table in seq.tables:
            self.pool.release(table)
        seq.tables, seq.computed = [], 0
        self.wake()

    def retain(self, kept: Retention) -> None:
        """Keep blocks beyond the end of their request."""
        self.retentions[kept.request_id] = kept
        if kept.deadline is None:
            self._cluster.report("never-freed", self._name, kept.request_id)
        self.wake()

    def notified(self, request_id: str) -> None:
        """Someone has read a request's blocks, or does not need them: free them."""
        self.reap()
        kept = self.retentions.get(request_id)
        if kept is None or kept.deadline is None:
            self._cluster.report("late-notification", self._name, request_id)
            return
        self._free(kept)

    def reap(self) -> None:
        """Free what has expired."""
        now = self.now()
        for kept in [kept for kept in self.retentions.values() if kept.expired(now)]:
            self._free(kept)

    def held(self, running: Iterable[Sequenced]) -> Held:
        """Who holds how much, now."""
        self.reap()
        by_kind: dict[str, dict[str, int]] = {"leased": {}, "retained": {}}
        for kept in self.retentions.values():
            by_kind[kept.kind][kept.request_id] = len(kept.blocks)
        by_request = {
            seq.request_id: sum(block != NULL_BLOCK for table in seq.tables for block in table) for seq in running
        }
        return Held(self.pool.capacity - self.pool.free, by_request, **by_kind)

    def _free(self, kept: Retention) -> None:
        del self.retentions[kept.request_id]
        self.pool.release(kept.blocks)
        self.wake()

    def wake(self) -> None:
        """Let everyone who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until something may have become free."""
        now = self.now()
        left = [
            kept.deadline - now for kept in self.retentions.values() if kept.deadline is not None and not kept.renewers
        ]
        timeout = max(0.0, min(left)) + 0.001 if left else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

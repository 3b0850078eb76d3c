"""The store as a turn sees it: it may be slow or down, and that never fails a turn."""

import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import structlog

from metadata_store import Absent, Holding, LastTurn, NotAsked, Put, Record, Store, StoreError, UnreadableEntry
from proxy.ledger import Ledger
from proxy.telemetry import Metrics

log = structlog.get_logger()

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Unavailable:
    """In place of a result: the store gave none."""

    asked: bool
    """Whether it was asked, so that what it was asked for may have happened."""


class Memory:
    """Calls to the store that end in time, are counted, and pause after a failure.

    The pause keeps a store that hangs from costing every turn its time-out.
    """

    def __init__(self, store: Store, pause: float, ledger: Ledger, metrics: Metrics) -> None:
        """``pause`` in seconds; ``ledger`` is kept up to date."""
        self._store = store
        self._pause = pause
        self._ledger = ledger
        self._metrics = metrics
        self._seconds = cache(metrics.store.labels)
        self._resting_until = 0.0
        self._failing = False

    async def take(self, key: str) -> Record | Absent | Unavailable:
        """See ``Store.take``."""
        taken = await self._call("take", self._store.take(key))
        if not isinstance(taken, Unavailable):
            self._ledger.gone(key)
        return taken

    async def put(self, key: str, record: Record) -> Put | Unavailable:
        """See ``Store.put``."""
        put = await self._call("put", self._store.put(key, record))
        if not isinstance(put, Unavailable):
            self._ledger.stored(key, Holding.of(record))
        return put

    async def note_turn(self, key: str, last: LastTurn) -> LastTurn | Unavailable | None:
        """See ``Store.note_turn``."""
        return await self._call("note_turn", self._store.note_turn(key, last))

    async def discard(self, key: str) -> Record | Unavailable | None:
        """See ``Store.discard``."""
        discarded = await self._call("discard", self._store.discard(key))
        if not isinstance(discarded, Unavailable):
            self._ledger.gone(key)
        return discarded

    async def restore(self, key: str, record: Record) -> bool | Unavailable:
        """See ``Store.restore``."""
        restored = await self._call("restore", self._store.restore(key, record))
        if restored is True:
            self._ledger.stored(key, Holding.of(record))
        return restored

    def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """See ``Store.scan``."""
        return self._store.scan()

    async def _call(self, name: str, call: Awaitable[_Result]) -> _Result | Unavailable:
        if time.monotonic() < self._resting_until:
            call.close()  # type: ignore[attr-defined]
            self._metrics.store_failures.labels(name).inc()
            return Unavailable(asked=False)
        began = time.perf_counter()
        try:
            result = await call
        except UnreadableEntry as error:
            # An entry of another version, while replicas are being replaced: no reason to pause.
            self._metrics.store_failures.labels(name).inc()
            log.info("an entry of another version was passed over", detail=str(error))
            return Unavailable(asked=True)
        except StoreError as error:
            self._metrics.store_failures.labels(name).inc()
            self._resting_until = time.monotonic() + self._pause
            if not self._failing:
                log.warning(
                    "the store does not answer: turns are served without reuse until it does",
                    detail=str(error),
                )
            self._failing = True
            return Unavailable(asked=not isinstance(error, NotAsked))
        finally:
            self._seconds(name).observe(time.perf_counter() - began)
        if self._failing:
            log.info("the store answers again")
            self._failing = False
        return result

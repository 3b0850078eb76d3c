"""The store as a turn sees it: it may be slow or down, and that never fails a turn."""

import time
from collections.abc import Awaitable
from typing import TypeVar

import structlog

from metadata_store import Absent, Record, Store, StoreError, UnreadableEntry
from proxy.telemetry import Metrics

log = structlog.get_logger()

_Result = TypeVar("_Result")


class Unavailable:
    """In place of a result: the store could not be asked."""


class Memory:
    """Calls to the store that end in time, are counted, and pause after a failure.

    The pause keeps a store that hangs from costing every turn its time-out.
    """

    def __init__(self, store: Store, pause: float, metrics: Metrics) -> None:
        """``pause`` in seconds."""
        self._store = store
        self._pause = pause
        self._metrics = metrics
        self._resting_until = 0.0
        self._failing = False

    async def take(self, key: str) -> Record | Absent | Unavailable:
        """See ``Store.take``."""
        return await self._call("take", self._store.take(key))

    async def put(self, key: str, record: Record) -> Record | Unavailable | None:
        """See ``Store.put``."""
        return await self._call("put", self._store.put(key, record))

    async def restore(self, key: str, record: Record) -> bool | Unavailable:
        """See ``Store.restore``."""
        return await self._call("restore", self._store.restore(key, record))

    async def _call(self, name: str, call: Awaitable[_Result]) -> _Result | Unavailable:
        if time.monotonic() < self._resting_until:
            call.close()  # type: ignore[attr-defined]
            self._metrics.store_failures.labels(name).inc()
            return Unavailable()
        try:
            with self._metrics.store.labels(name).time():
                result = await call
        except UnreadableEntry as error:
            # An entry of another version, while replicas are being replaced: no reason to pause.
            self._metrics.store_failures.labels(name).inc()
            log.info("an entry of another version was passed over", detail=str(error))
            return Unavailable()
        except StoreError as error:
            self._metrics.store_failures.labels(name).inc()
            self._resting_until = time.monotonic() + self._pause
            if not self._failing:
                log.warning(
                    "the store does not answer: turns are served without reuse until it does",
                    detail=str(error),
                )
            self._failing = True
            return Unavailable()
        if self._failing:
            log.info("the store answers again")
            self._failing = False
        return result

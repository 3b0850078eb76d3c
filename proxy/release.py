"""Giving retained blocks back to decode before their time, where nobody will read them."""

import asyncio
import uuid
from enum import StrEnum

import msgspec
import structlog

from metadata_store import Record
from proxy.body import dump, raw
from proxy.call import Clock
from proxy.pool import Pool
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Upstream
from router.kv_params import KvParams, MalformedParams
from router.reuse import holder_state
from router.workers import Role

log = structlog.get_logger()

_AT_ONCE = 4
_WAITING = 1000
_TIMEOUT = 60.0


class Why(StrEnum):
    """Whose blocks these were."""

    DISPLACED = "displaced"
    DIVERGED = "diverged"
    UNWANTED = "unwanted"
    UNUSED = "unused"


class Releaser:
    """Releases in the background, a few at a time. Best effort: what it misses, the engine's TTL frees.

    A prefill worker is asked for one token, with decode's parameters and nothing to read: it tells decode
    that the reading is over, and decode frees.
    """

    def __init__(self, pool: Pool, upstream: Upstream, metrics: Metrics, clock: Clock) -> None:
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._running: set[asyncio.Task[None]] = set()

    def release(self, worker: str, generation: str | None, params: bytes, model: str, why: Why) -> None:
        """Let ``worker`` free the blocks that ``params`` name. Only for blocks that no turn may read any more."""
        holder = self._pool.find(Role.DECODE, worker)
        if holder is None or holder.generation != generation or len(self._running) >= _WAITING:
            self._metrics.releases.labels(why, "left").inc()
            return
        task = asyncio.create_task(self._release(params, model, why))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def release_record(self, record: Record, why: Why) -> None:
        """The same for an entry; not for one past its deadline, which the engine frees by itself."""
        if holder_state(record, self._pool.find(Role.DECODE, record.worker), self._clock()) is not None:
            return
        self.release(record.worker, record.generation, record.params, record.model, why)

    async def stop(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for what is under way."""
        if self._running:
            await asyncio.wait(self._running, timeout=patience)
        for task in self._running:
            task.cancel()

    async def _release(self, params: bytes, model: str, why: Why) -> None:
        try:
            members = KvParams(params).nothing()
        except MalformedParams:
            self._metrics.releases.labels(why, "left").inc()
            return
        request = {"prompt": raw("."), "max_tokens": raw(1), "kv_transfer_params": msgspec.Raw(dump(members))}
        body = dump(request | ({"model": raw(model)} if model else {}))
        async with self._gate:
            prefill = self._pool.choose(Role.PREFILL)
            answer = await self._upstream.post(
                prefill, "/v1/completions", body, _TIMEOUT, request_id=f"release-{uuid.uuid4().hex}"
            )
        released = isinstance(answer, Answer)
        self._metrics.releases.labels(why, "released" if released else "failed").inc()
        if not released:
            log.info("retained blocks could not be released: the engine frees them later", detail=str(answer))

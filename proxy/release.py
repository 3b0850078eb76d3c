"""Giving retained blocks back to decode before their time, where nobody will read them."""

import asyncio

import msgspec
import structlog

from metadata_store import Record
from proxy.background import Background
from proxy.body import dump, raw
from proxy.call import Clock, unique_id
from proxy.pool import Pool
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Failed, Refused, Upstream
from router.kv_params import KvParams, MalformedParams
from router.reuse import holder_state
from router.words import Word
from router.workers import Role

log = structlog.get_logger()

_AT_ONCE = 4
_WAITING = 1000
_TIMEOUT = 60.0
_TRIES = 3


class Why(Word):
    """Whose blocks these were."""

    DISPLACED = "displaced"
    DIVERGED = "diverged"
    UNWANTED = "unwanted"
    UNUSED = "unused"
    ABANDONED = "abandoned"
    DELETED = "deleted"
    DRAINED = "drained"
    IDLE = "idle"
    BUDGET = "budget"
    PRESSURE = "pressure"
    SHUTDOWN = "shutdown"


class Releaser:
    """Releases in the background, a few at a time. Best effort: what it misses, the engine's TTL frees.

    A prefill worker is asked for one token, with decode's parameters and nothing to read: it tells decode
    that the reading is over, and decode frees.
    """

    def __init__(self, pool: Pool, upstream: Upstream, background: Background, metrics: Metrics, clock: Clock) -> None:
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._background = background

    def release(
        self, worker: str, generation: str | None, params: bytes, model: str, why: Why
    ) -> asyncio.Task[None] | None:
        """Let ``worker`` free the blocks that ``params`` name. Only for blocks that no turn may read any more.

        The task that does it, for who wants to wait; None if it is left to the engine.
        """
        if not self._is_there(worker, generation) or len(self._background) >= _WAITING:
            self._metrics.releases.labels(why, "left").inc()
            return None
        return self._background.start(self._release(worker, generation, params, model, why))

    def release_record(self, record: Record, why: Why) -> asyncio.Task[None] | None:
        """The same for an entry; not for one past its deadline, which the engine frees by itself."""
        if holder_state(record, self._pool.find(Role.DECODE, record.worker), self._clock()) is not None:
            return None
        return self.release(record.worker, record.generation, record.params, record.model, why)

    async def _release(self, worker: str, generation: str | None, params: bytes, model: str, why: Why) -> None:
        try:
            members = KvParams(params).nothing()
        except MalformedParams:
            self._metrics.releases.labels(why, "left").inc()
            return
        request = {"prompt": raw("."), "max_tokens": raw(1), "kv_transfer_params": msgspec.Raw(dump(members))}
        body = dump(request | ({"model": raw(model)} if model else {}))
        async with self._gate:
            if not self._is_there(worker, generation):
                self._metrics.releases.labels(why, "left").inc()
                return
            answer = await self._tell(worker, why, body)
        released = isinstance(answer, Answer)
        self._metrics.releases.labels(why, "released" if released else "failed").inc()
        if not released:
            log.info("retained blocks could not be released: the engine frees them later", detail=str(answer))

    async def _tell(self, worker: str, why: Why, body: bytes) -> Answer | Refused | Failed:
        """Have a prefill worker tell ``worker``; another, or the same again, where that fails.

        It reads nothing, so that doing it twice does no harm.
        """
        tried: tuple[str, ...] = ()
        answer: Answer | Refused | Failed = Failed("not tried", sent=False)
        for _ in range(_TRIES):
            prefill = self._pool.aide(Role.PREFILL, tried=tried)
            with self._pool.errand(prefill) as errand:
                answer = await self._upstream.post(
                    prefill, "/v1/completions", body, _TIMEOUT, request_id=f"release-{unique_id()}"
                )
                if not isinstance(answer, Failed):
                    break
                if answer.status is None:
                    # One that is answered with 5xx could not reach decode: that is not this worker's fault.
                    errand.failed()
            tried = (*tried, prefill.name)
        return answer

    def _is_there(self, worker: str, generation: str | None) -> bool:
        """Whether ``worker`` still is in the start that keeps the blocks: another has given them to others."""
        holder = self._pool.find(Role.DECODE, worker)
        return holder is not None and generation is not None and holder.generation == generation

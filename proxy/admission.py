"""Which turns may run now: so many at once, the others wait for a moment, the rest are told to come again."""

import asyncio
import math
from collections.abc import Callable
from enum import StrEnum

from proxy.errors import ApiError, draining, too_many
from proxy.pool import Pool
from proxy.telemetry import Metrics
from router.fair_queue import FairQueue
from router.workers import Role

_LOOK_SECONDS = 0.25
_LONGEST_RETRY_AFTER = 60


class Verdict(StrEnum):
    """What becomes of who waits for a place."""

    ADMITTED = "admitted"
    FULL = "full"
    LATE = "late"
    DRAINING = "draining"


_Waiting = asyncio.Future[Verdict]


class Admission:
    """Places for running turns, and the queue in front of them."""

    def __init__(self, capacity: Callable[[], float], size: int, patience: float, metrics: Metrics) -> None:
        """``capacity`` tells how many turns may run at once, ``size`` how many may wait, ``patience`` how long (s)."""
        self._capacity = capacity
        self._patience = patience
        self._metrics = metrics
        self._queue: FairQueue[_Waiting] = FairQueue(size)
        self._running = 0
        self._last_wait = 0.0
        self._closed = False
        self._looking: asyncio.TimerHandle | None = None

    async def enter(self, caller: str) -> None:
        """A place among the running turns, waited for if need be; ``leave`` gives it back.

        Raises ``ApiError``: 429 if there is no room to wait or it took too long, 503 after ``close``.
        Who is cancelled while waiting leaves the queue at once.
        """
        if self._closed:
            raise self._refusal(Verdict.DRAINING)
        if not self._queue and self._running < self._capacity():
            self._running += 1
        else:
            verdict = await self._wait(caller)
            if verdict is not Verdict.ADMITTED:
                raise self._refusal(verdict)
        self._metrics.running.inc()

    def leave(self) -> None:
        """Who entered is done."""
        self._metrics.running.dec()
        self._give_back()

    def close(self) -> None:
        """Admit nobody any more. Those who wait are refused now: another replica can serve them at once."""
        self._closed = True
        while (waiting := self._queue.next()) is not None:
            _tell(waiting, Verdict.DRAINING)

    async def _wait(self, caller: str) -> Verdict:
        """If it is ADMITTED, the place has been counted."""
        loop = asyncio.get_running_loop()
        waiting: _Waiting = loop.create_future()
        displaced = self._queue.add(caller, waiting)
        if displaced is waiting:
            return Verdict.FULL
        if displaced is not None:
            _tell(displaced, Verdict.FULL)
        began = loop.time()
        patience = loop.call_later(self._patience, self._run_out, caller, waiting)
        # The capacity may have grown since a turn last ended.
        self._look()
        try:
            with self._metrics.queued.track_inprogress():
                verdict = await waiting
        except asyncio.CancelledError:
            self._queue.discard(caller, waiting)
            if not waiting.cancelled() and waiting.result() is Verdict.ADMITTED:
                self._give_back()
            raise
        finally:
            patience.cancel()
            self._metrics.queue_wait.observe(loop.time() - began)
        self._last_wait = loop.time() - began
        return verdict

    def _run_out(self, caller: str, waiting: _Waiting) -> None:
        self._queue.discard(caller, waiting)
        _tell(waiting, Verdict.LATE)

    def _give_back(self) -> None:
        self._running -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue and self._running < self._capacity():
            waiting = self._queue.next()
            if waiting is not None and _tell(waiting, Verdict.ADMITTED):
                self._running += 1

    def _look(self) -> None:
        """Hand out now, and again from time to time: nobody tells when a worker has come up."""
        self._hand_out()
        if self._looking is not None:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look) if self._queue else None

    def _refusal(self, verdict: Verdict) -> ApiError:
        self._metrics.refused.labels(verdict).inc()
        if verdict is Verdict.DRAINING:
            return draining()
        # What the last one waited is the best guess of when there is room for another.
        seconds = min(max(1, math.ceil(self._last_wait)), _LONGEST_RETRY_AFTER)
        return too_many(seconds)


def decode_places(pool: Pool, bound: int) -> Callable[[], float]:
    """How many turns may run at once: ``bound`` for each decode worker that takes work; without end if it is 0.

    While none is up all count, as a turn is then tried anyway and should be told soon what becomes of it.
    """
    if not bound:
        return lambda: math.inf

    def places() -> float:
        workers = pool.all(Role.DECODE)
        return bound * (sum(worker.up and not worker.draining for worker in workers) or len(workers))

    return places


def _tell(waiting: _Waiting, verdict: Verdict) -> bool:
    """Whether it still wanted to know."""
    if waiting.done():
        return False
    waiting.set_result(verdict)
    return True

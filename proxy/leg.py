"""What runs on a worker, while it does: it counts as running, and the worker's breaker is told what becomes of it."""

from typing import Self

import structlog
from prometheus_client import Gauge

from proxy.call import Clock
from proxy.upstream import Failed, Refused
from router.workers import Worker

log = structlog.get_logger()


class Errand:
    """What is no turn's leg, and counts as running on its worker all the same: from when it is entered, once.

    That it succeeds does not say that the worker serves turns: one that fails them all may yet give back blocks.
    """

    __slots__ = ("_clock", "_running", "_tokens", "_worker")

    def __init__(self, worker: Worker, tokens: int, running: Gauge, clock: Clock) -> None:
        """``tokens`` for the worker to compute or hold, 0 if unknown; ``running`` shows how many legs run there."""
        self._worker = worker
        self._tokens = tokens
        self._running = running
        self._clock = clock

    def __enter__(self) -> Self:
        worker = self._worker
        worker.in_flight += 1
        worker.in_flight_tokens += self._tokens
        self._running.set(worker.in_flight)
        return self

    def __exit__(self, *_: object) -> None:
        worker = self._worker
        worker.in_flight -= 1
        worker.in_flight_tokens -= self._tokens
        self._running.set(worker.in_flight)

    def failed(self) -> None:
        """The worker did not answer, or not to the end, or with a 5xx."""
        was_closed = self._worker.breaker.closed
        self._worker.breaker.failed(self._clock())
        if was_closed and not self._worker.breaker.closed:
            log.warning("worker keeps failing turns: none are sent to it for a while", worker=self._worker.name)


class Leg(Errand):
    """A turn's leg: the trial too, if its worker's breaker waits for one."""

    __slots__ = ("_trial",)

    def __enter__(self) -> Self:
        self._trial = self._worker.breaker.begin(self._clock())
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._trial:
            self._worker.breaker.trial_over()

    def ended(self, result: object) -> None:
        """The worker served it, or, where ``result`` is a ``Failed``, did not.

        A ``Refused`` tells nothing: that is done before there is anything to do, also where all turns fail.
        """
        if isinstance(result, Failed):
            self.failed()
        elif not isinstance(result, Refused):
            self._worker.breaker.succeeded()


class Reading:
    """A leg elsewhere that reads what ``holder`` holds; None for a worker that is not in the pool any more."""

    __slots__ = ("_holder",)

    def __init__(self, holder: Worker | None) -> None:
        self._holder = holder

    def __enter__(self) -> None:
        if self._holder is not None:
            self._holder.readers += 1

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder.readers -= 1

"""What went wrong so far in one turn, and whether it is worth going on."""

from collections import defaultdict

import structlog

from proxy.call import Call, Report
from proxy.telemetry import Metrics
from proxy.upstream import Failed
from router.reuse import Outcome, Reason
from router.workers import Role, Worker

log = structlog.get_logger()

MOST_BREAKS = 3
"""Workers that may go away under one request: after these, the request may be what they die of."""


class Setbacks:
    """Keeps count, in the report, the metrics and the log."""

    def __init__(self, call: Call, report: Report, metrics: Metrics) -> None:
        self._call = call
        self._report = report
        self._metrics = metrics
        self._failed: defaultdict[Role, list[str]] = defaultdict(list)
        self._broken: set[str] = set()

    def failed(self, role: Role) -> tuple[str, ...]:
        """Names of the workers that failed in this turn: asked again only where no other is left."""
        return tuple(self._failed[role])

    @property
    def hopeless(self) -> bool:
        """Whether so many workers went away under this request that it must not be given to more of them."""
        return len(self._broken) >= MOST_BREAKS

    def failure(self, worker: Worker, failed: Failed, reason: Reason) -> None:
        """A worker gave no usable answer."""
        self._failed[worker.role].append(worker.name)
        if failed.sent and failed.status is None:
            self._broken.add(worker.name)
        self.step_down(worker, reason, failed.detail)

    def nothing_to_read(self, prefill: Worker) -> None:
        """Prefill answered without parameters."""
        self.step_down(prefill, Reason.PREFILL_WITHOUT_PARAMS, "decode serves the turn alone")

    def other_tokens(self, prefill: Worker) -> None:
        """Prefill worked on another prompt."""
        self.step_down(prefill, Reason.PREFILL_OTHER_TOKENS, "it is given no token ids until it restarts")

    def step_down(self, worker: Worker, reason: Reason, detail: str) -> None:
        """Something that was tried did not work; a reuse that had been decided is then no more."""
        if self._report.outcome in (Outcome.HIT, Outcome.PARTIAL):
            self._report.label(Outcome.FAILED, reason)
        self._metrics.fallbacks.labels(reason).inc()
        log.warning(
            "a step of a turn failed; the turn goes on without it",
            reason=reason,
            role=worker.role,
            worker=worker.name,
            detail=detail,
            request_id=self._call.request_id,
        )

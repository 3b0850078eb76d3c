"""The prefill leg with what was verified: sent once, whatever comes of it."""

import structlog

from proxy.abandoned import Abandoned
from proxy.call import Call, Clock, Report
from proxy.pool import Pool
from proxy.prefill import NothingToRead, OtherTokens, Prefilled, PrefillLeg, PrefillResult
from proxy.recall import Verified
from proxy.release import Releaser, Why
from proxy.setbacks import Setbacks
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.token_ids import TokenIds
from proxy.upstream import Failed, Refused
from router.reuse import Reason
from router.ttl_watch import TtlWatch
from router.workers import Role

log = structlog.get_logger()


class ReuseLeg:
    """Sends what was verified, within the time that its blocks have."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        prefill_leg: PrefillLeg,
        abandoned: Abandoned,
        releaser: Releaser,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._prefill_leg = prefill_leg
        self._abandoned = abandoned
        self._releaser = releaser
        self._metrics = metrics
        self._clock = clock
        self._ttl: dict[str, TtlWatch] = {}

    async def send(
        self, call: Call, report: Report, ids: TokenIds | None, verified: Verified, setbacks: Setbacks
    ) -> PrefillResult:
        """What came of it.

        The engines' read is one-sided, and the blocks are free after it. A second read could find other tokens' KV,
        so from here on the entry is neither sent again nor put back. For the same reason the leg is given up before
        decode frees the blocks by itself: prefill may be too busy to have read them by then.
        """
        record, worker = verified.record, verified.prefill
        now = self._clock()
        left = record.deadline + self._settings.decoder_kv_blocks_margin / 2 - now
        patience = min(self._settings.prefill_timeout, left)
        with self._pool.reading(Role.DECODE, record.worker):
            result = await self._prefill_leg.send(call, report, worker, ids, verified.reuse, patience)
        watch = self._ttl.setdefault(record.worker, TtlWatch())
        match result:
            case Prefilled():
                watch.succeeded(now - record.stored_at)
                self._metrics.reuse_age.observe(now - record.stored_at)
                report.prompt_tokens = result.prompt_tokens
            case NothingToRead():
                setbacks.nothing_to_read(worker)
            case Refused():
                # The engine itself was not asked: the blocks are still held, and nobody will read them.
                self._releaser.release_record(record, Why.UNUSED)
            case OtherTokens():
                setbacks.other_tokens(worker)
                self._pool.distrust(worker, call.dialect.name)
            case Failed(sent=False):
                setbacks.failure(worker, result, Reason.PREFILL_UNREACHABLE)
                self._releaser.release_record(record, Why.UNUSED)
            case Failed(status=status):
                answered = status is not None
                setbacks.failure(worker, result, Reason.PREFILL_ERROR if answered else Reason.PREFILL_UNREACHABLE)
                if answered:
                    self._tell_ttl(record.worker, watch.failed(now - record.stored_at))
                self._abandoned.reusing(record)
        return result

    def _tell_ttl(self, worker: str, age: float | None) -> None:
        if age is not None:
            log.warning(
                "reuses keep failing before their deadline: decode frees blocks earlier than the setting"
                " decoder_kv_blocks_ttl says; set it to what decode was started with",
                worker=worker,
                setting=self._settings.decoder_kv_blocks_ttl,
                failed_at_age=round(age, 1),
            )

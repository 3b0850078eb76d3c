"""One turn, start to end: recall, prefill, decode, and what to do where one of them fails."""

from dataclasses import dataclass, field
from functools import partial

import structlog

from proxy.answer import AnswerLeg
from proxy.call import Call, Clock, Reply, Report
from proxy.errors import nobody_answers
from proxy.harvest import Harvest
from proxy.pool import Pool
from proxy.prefill import NothingToRead, OtherTokens, Prefilled, PrefillLeg, PrefillResult
from proxy.recall import Recall, Recalled, Verified
from proxy.release import Releaser, Why
from proxy.remember import Remember
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Failed, Refused
from router.reuse import Outcome, Reason
from router.ttl_watch import TtlWatch
from router.workers import Role, Worker

log = structlog.get_logger()

WHOLE_TURNS = 2
"""How often both legs are tried before one worker serves the turn alone."""

PLAIN_PREFILLS = 2
"""How many prefill workers are asked before decode serves the turn alone."""


@dataclass
class Tried:
    """Workers that failed in this turn: asked again only where no other is left."""

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)


class Turns:
    """Serves turns. Holds what all turns share."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        recall: Recall,
        prefill_leg: PrefillLeg,
        answer_leg: AnswerLeg,
        remember: Remember,
        releaser: Releaser,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._recall = recall
        self._prefill_leg = prefill_leg
        self._answer_leg = answer_leg
        self._remember = remember
        self._releaser = releaser
        self._metrics = metrics
        self._clock = clock
        self._ttl: dict[str, TtlWatch] = {}

    async def serve(self, call: Call, report: Report) -> Reply:
        """The answer to ``call``; ``report`` is filled in on the way.

        Raises ``ApiError`` (503) if no worker could serve it.
        """
        if (alone := call.dialect.alone(call.request)) is not None:
            report.label(Outcome.UNSUPPORTED, alone)
            return await self._by_one_worker(call, report)

        if not (self._pool.able(Role.PREFILL) and self._pool.able(Role.DECODE)):
            report.label(Outcome.UNSUPPORTED, Reason.ROLE_DOWN)
            return await self._by_one_worker(call, report)

        recalled = await self._recall.of(call, report)
        tried = Tried()
        reusable = recalled.verified
        for _ in range(WHOLE_TURNS):
            prefilled = await self._prefill(call, report, recalled, reusable, tried)
            reusable = None
            if isinstance(prefilled, Refused):
                return Reply(prefilled.status, prefilled.content_type, prefilled.body, report)
            if not isinstance(prefilled, Prefilled):
                break
            reply = await self._decode(call, report, recalled, prefilled, tried)
            if reply is not None:
                return reply
        return await self._by_one_worker(call, report)

    async def _prefill(
        self, call: Call, report: Report, recalled: Recalled, reusable: Verified | None, tried: Tried
    ) -> PrefillResult:
        """With reuse where it was verified; if that fails plain; if that fails plain on another worker."""
        if reusable is not None:
            result = await self._reusing(call, report, recalled, reusable, tried)
            if isinstance(result, Prefilled | Refused | NothingToRead):
                return result
        for _ in range(min(PLAIN_PREFILLS, len(self._pool.all(Role.PREFILL)))):
            worker = self._pool.choose(Role.PREFILL, preferred=recalled.prefill, tried=tuple(tried.prefill))
            report.prefill = worker.name
            result = await self._prefill_leg.send(call, worker, recalled.ids, None)
            match result:
                case Prefilled():
                    report.prompt_tokens = result.prompt_tokens
                    return result
                case NothingToRead():
                    self._step_down(call, report, Reason.PREFILL_WITHOUT_PARAMS, worker, "decode serves alone")
                    return result
                case Refused():
                    return result
                case Failed(detail):
                    self._step_down(call, report, Reason.PREFILL_ERROR, worker, detail)
                    tried.prefill.append(worker.name)
                case OtherTokens():
                    self._distrust(call, worker)
        return result

    async def _reusing(
        self, call: Call, report: Report, recalled: Recalled, verified: Verified, tried: Tried
    ) -> PrefillResult:
        """The prefill leg with what was verified: sent once, whatever comes of it.

        The engines' read is one-sided, and the blocks are free after it. A second read could find other
        tokens' KV, so from here on the entry is neither sent again nor put back.
        """
        record, worker = verified.record, verified.prefill
        report.prefill = worker.name
        age = self._clock() - record.stored_at
        result = await self._prefill_leg.send(call, worker, recalled.ids, verified.reuse)
        watch = self._ttl.setdefault(record.worker, TtlWatch())
        match result:
            case Prefilled():
                watch.succeeded(age)
                report.prompt_tokens = result.prompt_tokens
            case NothingToRead():
                self._step_down(call, report, Reason.PREFILL_WITHOUT_PARAMS, worker, "decode serves the turn alone")
            case Refused():
                # The engine itself was not asked: the blocks are still held, and this entry is gone.
                self._releaser.release_record(record, Why.UNUSED)
            case OtherTokens():
                report.label(Outcome.FAILED, Reason.PREFILL_OTHER_TOKENS)
                self._distrust(call, worker)
            case Failed(detail, status):
                reason = Reason.PREFILL_UNREACHABLE if status is None else Reason.PREFILL_ERROR
                self._step_down(call, report, reason, worker, detail)
                if status is None:
                    tried.prefill.append(worker.name)
                self._tell_ttl(record.worker, watch.failed(age))
        return result

    async def _decode(
        self,
        call: Call,
        report: Report,
        recalled: Recalled,
        prefilled: Prefilled,
        tried: Tried,
    ) -> Reply | None:
        """Decode's answer, or None if it failed before anything of it had reached the client.

        What prefill computed is then not given to another decode worker: it may have been read.
        """
        worker = self._pool.choose(Role.DECODE, preferred=recalled.decode, tried=tuple(tried.decode))
        report.decode = worker.name
        ids = prefilled.ids if recalled.ids_say_all and worker.honours_ids(call.dialect.name) else None
        body = call.dialect.decode_leg(call.request, prefilled.params, ids, tell_ids=recalled.key is not None)
        remember = partial(self._remember.after, call, recalled.key, report, worker)
        reply = await self._answer_leg.send(call, report, worker, body, remember)
        if isinstance(reply, Failed):
            self._step_down(call, report, Reason.DECODE_ERROR, worker, reply.detail)
            tried.decode.append(worker.name)
            return None
        return reply

    async def _by_one_worker(self, call: Call, report: Report) -> Reply:
        """One worker does both: each once, decode workers first, but those of a role that is down last."""
        body = call.dialect.decode_leg(call.request, None, None, tell_ids=False)
        details = []
        for role in sorted((Role.DECODE, Role.PREFILL), key=self._pool.able, reverse=True):
            tried: list[str] = []
            while len(tried) < len(self._pool.all(role)):
                worker = self._pool.choose(role, tried=tuple(tried))
                report.decode = worker.name
                reply = await self._answer_leg.send(call, report, worker, body, _nothing_retained)
                if not isinstance(reply, Failed):
                    return reply
                tried.append(worker.name)
                details.append(f"{worker.name}: {reply.detail}")
                self._step_down(call, report, Reason.WORKER_ERROR, worker, reply.detail)
        raise nobody_answers("; ".join(details))

    def _step_down(self, call: Call, report: Report, reason: Reason, worker: Worker, detail: str) -> None:
        """Say and count that a step failed; a reuse that had been decided is then no more."""
        if report.outcome in (Outcome.HIT, Outcome.PARTIAL):
            report.label(Outcome.FAILED, reason)
        self._metrics.fallbacks.labels(reason).inc()
        log.warning(
            "a step of a turn failed; the turn goes on without it",
            reason=reason,
            worker=worker.name,
            detail=detail,
            request_id=call.request_id,
        )

    def _distrust(self, call: Call, worker: Worker) -> None:
        self._pool.distrust(worker, call.dialect.name)
        self._metrics.fallbacks.labels(Reason.PREFILL_OTHER_TOKENS).inc()
        log.error(
            "prefill worked on other tokens than those it was given; it is given none until it restarts",
            worker=worker.name,
            endpoint=call.dialect.name,
            request_id=call.request_id,
        )

    def _tell_ttl(self, worker: str, age: float | None) -> None:
        if age is not None:
            log.warning(
                "reuses keep failing before their deadline: decode frees blocks earlier than the setting"
                " decoder_kv_blocks_ttl says; set it to what decode was started with",
                worker=worker,
                setting=self._settings.decoder_kv_blocks_ttl,
                failed_at_age=round(age, 1),
            )


async def _nothing_retained(harvest: Harvest, mode: str) -> None:
    """A worker that served a turn alone keeps nothing of it."""

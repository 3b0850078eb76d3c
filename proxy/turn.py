"""One turn, start to end: recall, prefill, decode, and what to do where one of them fails."""

import asyncio
from functools import partial

from msgspec.structs import replace

from proxy.abandoned import Abandoned
from proxy.answer import AnswerLeg
from proxy.call import Call, Reply, Report
from proxy.errors import nobody_answers
from proxy.harvest import Harvest
from proxy.pool import Pool
from proxy.prefill import NothingToRead, OtherTokens, Prefilled, PrefillLeg, PrefillResult
from proxy.prompt_ids import PromptIds
from proxy.recall import Recall, Recalled, Verified
from proxy.remember import DecodeLeg, Remember
from proxy.reuse_leg import ReuseLeg
from proxy.room import Room
from proxy.setbacks import Setbacks
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Failed, Refused
from router.reuse import Outcome, Reason
from router.select import best_first
from router.workers import Role

WHOLE_TURNS = 2
"""How often both legs are tried, if it is decode that fails, before one worker serves the turn alone."""

PLAIN_PREFILLS = 2
"""How often a plain prefill is tried, on another worker if there is one, before decode serves the turn alone."""


class Turns:
    """Serves turns. Holds what all turns share."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        recall: Recall,
        prompt_ids: PromptIds,
        prefill_leg: PrefillLeg,
        reuse_leg: ReuseLeg,
        answer_leg: AnswerLeg,
        remember: Remember,
        room: Room,
        abandoned: Abandoned,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._recall = recall
        self._prompt_ids = prompt_ids
        self._prefill_leg = prefill_leg
        self._reuse_leg = reuse_leg
        self._answer_leg = answer_leg
        self._remember = remember
        self._room = room
        self._abandoned = abandoned
        self._metrics = metrics

    async def serve(self, call: Call, report: Report) -> Reply:
        """The answer to ``call``; ``report`` is filled in on the way.

        Raises ``ApiError`` (503) if no worker could serve it.
        """
        setbacks = Setbacks(call, report, self._metrics)
        if (alone := call.dialect.alone(call.request)) is not None:
            report.label(Outcome.UNSUPPORTED, alone)
            return await self._by_one_worker(call, report, setbacks)
        if not (self._pool.able(Role.PREFILL) and self._pool.able(Role.DECODE)):
            report.label(Outcome.UNSUPPORTED, Reason.ROLE_DOWN)
            return await self._by_one_worker(call, report, setbacks)

        recalled = await self._recall.of(call, report)
        if recalled.ids is None and recalled.ids_say_all and call.dialect.wants_ids_first(call.request):
            recalled = replace(recalled, ids=await self._prompt_ids.of(call, report))
        reusable = recalled.verified
        for _ in range(WHOLE_TURNS):
            prefilled = await self._prefill(call, report, recalled, reusable, setbacks)
            reusable = None
            if isinstance(prefilled, Refused):
                return Reply(prefilled.status, prefilled.content_type, prefilled.body, report)
            if not isinstance(prefilled, Prefilled):
                break
            reply = await self._decode(call, report, recalled, prefilled, setbacks)
            if reply is not None:
                return reply
        return await self._by_one_worker(call, report, setbacks)

    async def _prefill(
        self, call: Call, report: Report, recalled: Recalled, reusable: Verified | None, setbacks: Setbacks
    ) -> PrefillResult:
        """With reuse where it was verified; if that fails plain; if that fails plain once more."""
        result: PrefillResult = Failed("not tried", sent=False)
        if reusable is not None:
            try:
                result = await self._reuse_leg.send(call, report, recalled.ids, reusable, setbacks)
            except asyncio.CancelledError:
                self._abandoned.reusing(reusable.record)
                raise
            if isinstance(result, Prefilled | Refused | NothingToRead):
                return result
        for _ in range(PLAIN_PREFILLS):
            if setbacks.hopeless:
                return result
            worker = self._pool.choose(Role.PREFILL, preferred=recalled.prefill, tried=setbacks.failed(Role.PREFILL))
            result = await self._prefill_leg.send(
                call, report, worker, recalled.ids, None, self._settings.prefill_timeout
            )
            match result:
                case Prefilled():
                    report.prompt_tokens = result.prompt_tokens
                    return result
                case Refused():
                    return result
                case NothingToRead():
                    setbacks.nothing_to_read(worker)
                    return result
                case OtherTokens():
                    setbacks.other_tokens(worker)
                    self._pool.distrust(worker, call.dialect.name)
                case Failed():
                    setbacks.failure(worker, result, Reason.PREFILL_ERROR)
        return result

    async def _decode(
        self, call: Call, report: Report, recalled: Recalled, prefilled: Prefilled, setbacks: Setbacks
    ) -> Reply | None:
        """Decode's answer, or None if it failed before anything of it had reached the client.

        What prefill computed is then not given to another decode worker: it may have been read.
        """
        tokens = report.prompt_tokens
        worker = self._pool.choose(
            Role.DECODE, preferred=recalled.decode, tried=setbacks.failed(Role.DECODE), tokens=tokens
        )
        report.decode = worker.name
        try:
            if not self._room.is_ample(worker, tokens, call.request.max_tokens):
                # Counted from now on, so that turns which are chosen a worker meanwhile see each other.
                with self._pool.leg(worker, tokens or 0):
                    await self._room.make(worker, tokens, call.request.max_tokens)
            # What came together with prefill's answer.
            await call.interruption.checkpoint()
        except asyncio.CancelledError:
            self._abandoned.prefilled(call, recalled, report, worker, prefilled)
            raise
        ids = prefilled.ids if recalled.ids_say_all and worker.honours_ids(call.dialect.name) else None
        tell_ids = call.key is not None and recalled.ids_say_all
        body = call.dialect.decode_leg(call.request, prefilled.params, ids.json if ids else None, tell_ids=tell_ids)
        leg = DecodeLeg(worker, worker.generation, prefilled.ids, report.prefill)
        remember = partial(self._remember.after, call, recalled.key, report, leg)
        reply = await self._answer_leg.send(call, report, worker, body, remember)
        if isinstance(reply, Failed):
            setbacks.failure(worker, reply, Reason.DECODE_ERROR)
            return None
        return reply

    async def _by_one_worker(self, call: Call, report: Report, setbacks: Setbacks) -> Reply:
        """One worker does both: each once, decode workers first, those of a role that is down last."""
        body = call.dialect.decode_leg(call.request, None, None, tell_ids=False)
        for role in sorted((Role.DECODE, Role.PREFILL), key=self._pool.able, reverse=True):
            for worker in best_first(self._pool.all(role), setbacks.failed(role)):
                if setbacks.hopeless:
                    break
                report.decode = worker.name
                reply = await self._answer_leg.send(call, report, worker, body, _nothing_retained)
                if not isinstance(reply, Failed):
                    return reply
                setbacks.failure(worker, reply, Reason.WORKER_ERROR)
        raise nobody_answers()


async def _nothing_retained(harvest: Harvest, mode: str) -> None:
    """A worker that served a turn alone keeps nothing of it."""

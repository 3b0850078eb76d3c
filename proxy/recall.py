"""Before the first leg: what decode still holds for the conversation, and how much of it may be reused."""

import asyncio

import msgspec
from msgspec.structs import replace

from metadata_store import MEMORY, Absent, Record
from proxy.background import Background
from proxy.call import Call, Clock, Report
from proxy.ledger import Ledger
from proxy.memory import Memory, Unavailable
from proxy.pool import Pool
from proxy.prompt_ids import PromptIds
from proxy.put_back import put_back
from proxy.release import Releaser, Why
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.token_ids import TokenIds
from router.reuse import Conditions, NoReuse, Outcome, Reason, Reuse, decide, holder_state
from router.workers import Role, Worker


class Verified(msgspec.Struct, frozen=True):
    """An entry that this turn alone has, and what of it was found equal to the prompt."""

    record: Record
    reuse: Reuse
    prefill: Worker
    """The worker that it was decided for."""


class Recalled(msgspec.Struct, frozen=True):
    """What a turn knows before its first leg."""

    ids: TokenIds | None = None
    """The prompt's token ids, if they had to be asked for."""
    verified: Verified | None = None
    key: str | None = None
    """Under which to remember what decode will hold after this turn; None if it must not be reused."""
    prefill: str | None = None
    """Name of the worker that prefilled the conversation last: its prefix cache may still know it."""
    decode: str | None = None
    """Name of the worker that answered last, likewise."""
    ids_say_all: bool = True
    """Whether token ids tell the whole prompt, so that the legs may be given them in its place."""


class Recall:
    """Takes entries and verifies them."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        memory: Memory,
        ledger: Ledger,
        prompt_ids: PromptIds,
        releaser: Releaser,
        background: Background,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._memory = memory
        self._ledger = ledger
        self._prompt_ids = prompt_ids
        self._releaser = releaser
        self._background = background
        self._metrics = metrics
        self._clock = clock

    async def of(self, call: Call, report: Report) -> Recalled:
        """Take the conversation's entry and verify it against the prompt; ``report`` gets the outcome.

        An entry that was taken and is of no use for this turn goes back, or its blocks are released.
        """
        opaque = call.dialect.opaque(call.request)
        if not call.reuse:
            report.label(Outcome.OFF, Reason.REUSE_OFF)
            return Recalled(ids_say_all=opaque is None)
        if opaque is not None:
            report.label(Outcome.UNSUPPORTED, opaque)
            return Recalled(ids_say_all=False)
        if call.key is None:
            report.label(Outcome.NONE, Reason.NO_CONVERSATION_ID)
            return Recalled()
        asked = self._asked_ahead(call, call.key, report)
        untouched: Record | None = None
        try:
            taken = await call.interruption.uncut(self._memory.take(call.key))
            # Nothing is sent to an engine here: whatever ends the verification early, a client that leaves included,
            # the entry goes back; once, as another turn may take it right after.
            untouched = taken if isinstance(taken, Record) else None
            # The client may have left meanwhile.
            await call.interruption.checkpoint()
            if not isinstance(taken, Record):
                return self._without(call.key, report, taken)
            recalled, left = await self._verify(call, call.key, report, taken, asked)
            if recalled.verified is not None:
                await call.interruption.checkpoint()
            untouched = left
            return recalled
        finally:
            if asked is not None:
                asked.cancel()
            if untouched is not None:
                back = put_back(self._memory, self._releaser, call.key, untouched)
                await asyncio.shield(self._background.start(back))

    def _without(self, key: str, report: Report, taken: Absent | Unavailable) -> Recalled:
        """What the turn knows where there was no entry to take."""
        if isinstance(taken, Unavailable):
            report.label(Outcome.FAILED, Reason.STORE_UNAVAILABLE)
            self._metrics.fallbacks.labels(Reason.STORE_UNAVAILABLE).inc()
            # Nobody could find what decode will hold: it is given back rather than kept for nobody.
            return Recalled()
        expired = taken is Absent.EXPIRED
        report.label(
            Outcome.EXPIRED if expired else Outcome.FIRST,
            Reason.PAST_DEADLINE if expired else Reason.NOTHING_RETAINED,
        )
        return Recalled(key=key)

    def _asked_ahead(self, call: Call, key: str, report: Report) -> asyncio.Task[TokenIds | None] | None:
        """The prompt's ids, asked for while a store elsewhere is asked for the entry, if one is known to be there."""
        if self._settings.store == MEMORY or self._ledger.find(key) is None:
            return None
        return asyncio.create_task(self._prompt_ids.of(call, report))

    async def _verify(
        self, call: Call, key: str, report: Report, record: Record, asked: asyncio.Task[TokenIds | None] | None
    ) -> tuple[Recalled, Record | None]:
        """What the turn knows then, and the entry if it was left as it is."""
        nothing = Recalled(key=key, prefill=record.prefill, decode=record.worker)
        report.turn = record.turn + 1
        holder = self._pool.find(Role.DECODE, record.worker)
        gone = holder_state(record, holder, self._clock())
        if gone is not None:
            report.label(gone.outcome, gone.reason)
            # A worker that is down may come back as it was.
            return nothing, record if gone.reason is Reason.WORKER_DOWN else None
        ids = await (asked or self._prompt_ids.of(call, report))
        if ids is None:
            report.label(Outcome.UNSUPPORTED, Reason.NO_TOKEN_IDS)
            return nothing, record
        prefill = self._pool.choose(Role.PREFILL, preferred=record.prefill)
        conditions = Conditions(self._clock(), call.scope, self._settings.kv_recompute_threshold)
        decision = decide(record, ids.numbers, holder, prefill, conditions)
        report.label(decision.outcome, decision.reason)
        if isinstance(decision, NoReuse):
            diverged = decision.outcome is Outcome.DIVERGED
            self._releaser.release_record(record, Why.DIVERGED if diverged else Why.UNUSED)
            return replace(nothing, ids=ids), None
        report.reused_tokens = decision.tokens
        return replace(nothing, ids=ids, verified=Verified(record, decision, prefill)), None

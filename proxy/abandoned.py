"""What becomes of a turn whose client left: nothing of it may stay pinned on an engine."""

import asyncio
from functools import partial

import structlog

from metadata_store import Record
from proxy.answer import AnswerLeg
from proxy.background import Background
from proxy.call import Call, Report
from proxy.prefill import Prefilled
from proxy.recall import Recalled
from proxy.release import Releaser, Why
from proxy.remember import DecodeLeg, Remember
from proxy.upstream import Failed
from router.workers import Worker

log = structlog.get_logger()


class Abandoned:
    """Ends turns in the background, after their clients."""

    def __init__(
        self, answer_leg: AnswerLeg, remember: Remember, releaser: Releaser, background: Background, grace: float
    ) -> None:
        """``grace``: seconds after which an engine has surely noticed that a request was given up."""
        self._answer_leg = answer_leg
        self._remember = remember
        self._releaser = releaser
        self._grace = grace
        self._background = background

    def prefilled(self, call: Call, recalled: Recalled, report: Report, worker: Worker, found: Prefilled) -> None:
        """Prefill keeps blocks that were never offered to decode.

        Decode takes them over with one token: that frees them on prefill, and keeps the prompt's KV for the
        same turn, tried again.
        """
        self._background.start(self._take_over(call, recalled, report, worker, found))

    def reusing(self, record: Record) -> None:
        """A prefill leg was given up that may or may not have read decode's blocks.

        They are given back only when prefill has surely stopped: it must not read what decode has put there since.
        """
        self._background.start(self._give_back(record))

    async def _take_over(
        self, call: Call, recalled: Recalled, report: Report, worker: Worker, found: Prefilled
    ) -> None:
        ids = found.ids if recalled.ids_say_all and worker.honours_ids(call.dialect.name) else None
        body = call.dialect.one_token_leg(call.request, found.params, ids.json if ids else None, tell_ids=True)
        leg = DecodeLeg(worker, worker.generation, found.ids, report.prefill)
        remember = partial(self._remember.after, call, recalled.key, report, leg)
        reply = await self._answer_leg.send(call, report, worker, body, remember)
        if isinstance(reply, Failed):
            log.info("prefill keeps an abandoned turn's blocks until its lease ends", detail=reply.detail)
            return
        reply.closing.close()

    async def _give_back(self, record: Record) -> None:
        await asyncio.sleep(self._grace)
        self._releaser.release_record(record, Why.ABANDONED)

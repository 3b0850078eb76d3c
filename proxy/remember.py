"""After decode's answer: keep what it holds for the next turn, or give it back."""

import time

import msgspec
import structlog

from metadata_store import LastTurn, Put, Record
from proxy.call import Call, Clock, Report
from proxy.harvest import Harvest
from proxy.memory import Memory, Unavailable
from proxy.release import Releaser, Why
from proxy.room import Room
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.token_ids import TokenIds
from router.fingerprint import Fingerprint, fingerprint, outline, tokens_in_common
from router.kv_params import KvParams, MalformedParams
from router.reuse import Reason, known_tokens
from router.workers import UNKNOWN_GENERATION, Worker

log = structlog.get_logger()


class DecodeLeg(msgspec.Struct, frozen=True):
    """A decode leg, as it was when it was sent."""

    worker: Worker
    generation: str | None
    """The worker's, before it began: an answer of an earlier start tells of blocks that are gone."""
    prompt_ids: TokenIds | None
    """Of the prompt whose blocks it reads; None if nobody told."""
    prefill: str
    """Name of the worker that computed them."""


_CURES = {
    "stream": "install the turnback-engine plugin beside vLLM (before 0.33 streams do not tell), see README",
    "whole": "start decode with bidirectional_kv_xfer in kv_connector_extra_config, see README",
}


class Remember:
    """Turns decode's parameters into the conversation's entry."""

    def __init__(
        self, settings: Settings, memory: Memory, room: Room, releaser: Releaser, metrics: Metrics, clock: Clock
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._room = room
        self._releaser = releaser
        self._metrics = metrics
        self._clock = clock
        self._told: set[tuple[str, str | None, str]] = set()

    async def after(
        self, call: Call, key: str | None, report: Report, leg: DecodeLeg, harvest: Harvest, mode: str
    ) -> None:
        """Remember under ``key`` what decode holds after an answer; ``mode`` is ``stream`` or ``whole``.

        Without a key, or where what is held cannot be told, it is given back. Raises nothing: the answer is
        complete, whatever becomes of this.
        """
        finished = self._clock() - harvest.since_told
        try:
            await self._after(call, key, report, leg, harvest, mode, finished)
        except Exception:
            log.exception("what decode holds could not be remembered", worker=leg.worker.name)

    async def _after(
        self,
        call: Call,
        key: str | None,
        report: Report,
        leg: DecodeLeg,
        harvest: Harvest,
        mode: str,
        finished: float,
    ) -> None:
        if not harvest.ended_well:
            return
        if harvest.params is None:
            self._missing(call, leg.worker, harvest, mode)
            await self._note(call, report, harvest, finished)
            return
        if leg.worker.generation != leg.generation:
            # It restarted since, or before and that was seen only now. The blocks are gone, or nobody can tell whose
            # they are: if there are any, they are given back.
            self._releaser.release(
                leg.worker.name, leg.worker.generation, bytes(harvest.params), call.request.model, Why.UNWANTED
            )
            return
        record = None if key is None else self._record(call, report, leg, harvest, finished)
        if record is None or key is None:
            self._give_back(call, leg, bytes(harvest.params))
            await self._note(call, report, harvest, finished)
            return
        put = await self._memory.put(key, record)
        await self._room.relieve(leg.worker, report.prompt_tokens or 0)
        match put:
            case Put(displaced, before):
                if displaced is not None:
                    self._releaser.release_record(displaced, Why.DISPLACED)
                self._compare(report, before, record.fingerprint)
            case Unavailable(asked=False):
                self._give_back(call, leg, record.params)
            case Unavailable(asked=True):
                # It may have been stored all the same, then another turn may read it, even if it is there no more.
                # Taking it out again would free only what the next turn could have used, and what the watch sees.
                pass

    async def _note(self, call: Call, report: Report, harvest: Harvest, finished: float) -> None:
        """Of a turn that leaves no entry: what it had computed all the same."""
        if call.key is None or not harvest.tokens or call.dialect.opaque(call.request) is not None:
            return
        # The last generated token has no KV.
        computed = fingerprint(harvest.tokens[:-1], call.scope)
        before = await self._memory.note_turn(call.key, LastTurn(finished, outline(computed)))
        if not isinstance(before, Unavailable):
            self._compare(report, before, computed)

    def _compare(self, report: Report, before: LastTurn | None, computed: Fingerprint) -> None:
        """What this turn computed again, and how long after the turn before it it came."""
        report.recomputed_tokens = 0
        if before is not None:
            again = min(tokens_in_common(before.computed, computed), report.prompt_tokens or 0)
            report.recomputed_tokens = max(0, again - report.reused_tokens)
            took = time.perf_counter() - report.started
            report.pause_seconds = max(0.0, self._clock() - took - before.ended_at)

    def _give_back(self, call: Call, leg: DecodeLeg, params: bytes) -> None:
        self._releaser.release(leg.worker.name, leg.generation, params, call.request.model, Why.UNWANTED)

    def _record(self, call: Call, report: Report, leg: DecodeLeg, harvest: Harvest, finished: float) -> Record | None:
        """The entry; None where nothing of it could ever be verified."""
        if harvest.params is None or leg.generation is None or leg.generation == UNKNOWN_GENERATION:
            return None
        try:
            params = KvParams(harvest.params)
        except MalformedParams as error:
            log.warning("decode's kv_transfer_params are not readable: nothing is reused", detail=str(error))
            return None
        if not self._same_prompt(call, leg, harvest):
            return None
        held = known_tokens(params, harvest.prompt_tokens, harvest.tokens)
        if not held:
            return None
        return Record(
            worker=leg.worker.name,
            generation=leg.generation,
            params=params.raw,
            fingerprint=fingerprint(held, call.scope),
            model=call.request.model,
            stored_at=finished,
            deadline=finished + self._settings.decoder_kv_blocks_ttl - self._settings.decoder_kv_blocks_margin,
            turn=report.turn,
            blocks=params.blocks,
            prefill=report.prefill,
        )

    def _same_prompt(self, call: Call, leg: DecodeLeg, harvest: Harvest) -> bool:
        """Whether decode answered the prompt that prefill computed, whose KV it has.

        Where it was not given the ids, it made the prompt itself, and its template may say something else.
        """
        if leg.prompt_ids is None or harvest.prompt_ids is None:
            return False
        if leg.prompt_ids.are(harvest.prompt_ids.json):
            # Read once for both.
            harvest.prompt_ids = leg.prompt_ids
            return True
        self._metrics.fallbacks.labels(Reason.DECODE_OTHER_TOKENS).inc()
        log.error(
            "prefill and decode make different prompts of the same request: their answers are not to be trusted;"
            " give both the same model, chat template and flags",
            prefill=leg.prefill,
            decode=leg.worker.name,
            request_id=call.request_id,
        )
        return False

    def _missing(self, call: Call, decode: Worker, harvest: Harvest, mode: str) -> None:
        """Say once for each start of a worker why its answers cannot be reused."""
        if call.request.stops_on_text and harvest.finished == "stop":
            # The engine keeps nothing of an answer that was cut at a stop string.
            return
        self._metrics.without_params.labels(decode.name, mode).inc()
        case = (decode.name, decode.generation, mode)
        if case not in self._told:
            self._told.add(case)
            log.warning(
                "decode's answer ended without kv_transfer_params: the next turn computes everything again",
                worker=decode.name,
                streamed=mode == "stream",
                cure=_CURES[mode],
            )

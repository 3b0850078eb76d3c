"""After decode's answer: keep what it holds for the next turn, or give it back."""

import structlog

from metadata_store import Record
from proxy.call import Call, Clock, Report
from proxy.harvest import Harvest
from proxy.memory import Memory, Unavailable
from proxy.release import Releaser, Why
from proxy.settings import Settings
from proxy.telemetry import Metrics
from router.fingerprint import fingerprint
from router.kv_params import KvParams, MalformedParams
from router.reuse import known_tokens
from router.workers import Worker

log = structlog.get_logger()

_CURES = {
    "stream": "install the turnback-engine plugin beside vLLM (before 0.33 streams do not tell), see README",
    "whole": "start decode with bidirectional_kv_xfer in kv_connector_extra_config, see README",
}


class Remember:
    """Turns decode's parameters into the conversation's entry."""

    def __init__(self, settings: Settings, memory: Memory, releaser: Releaser, metrics: Metrics, clock: Clock) -> None:
        self._settings = settings
        self._memory = memory
        self._releaser = releaser
        self._metrics = metrics
        self._clock = clock
        self._told: set[tuple[str, str | None, str]] = set()

    async def after(
        self, call: Call, key: str | None, report: Report, decode: Worker, harvest: Harvest, mode: str
    ) -> None:
        """Remember under ``key`` what ``decode`` holds after an answer; ``mode`` is ``stream`` or ``whole``.

        Without a key, or where what is held cannot be told, it is given back.
        """
        arrival = self._clock()
        if harvest.failed:
            return
        if harvest.params is None:
            self._missing(call, decode, harvest, mode)
            return
        record = None if key is None else self._record(call, report, decode, harvest, arrival)
        if record is None or key is None:
            raw = bytes(harvest.params)
            self._releaser.release(decode.name, decode.generation, raw, call.request.model, Why.UNWANTED)
            return
        displaced = await self._memory.put(key, record)
        if isinstance(displaced, Unavailable):
            # It may have been stored all the same: it is not released, and lives to its TTL.
            return
        if displaced is not None:
            self._releaser.release_record(displaced, Why.DISPLACED)

    def _record(self, call: Call, report: Report, decode: Worker, harvest: Harvest, arrival: float) -> Record | None:
        """The entry; None where nothing of it could ever be verified."""
        if harvest.params is None or decode.generation is None:
            return None
        try:
            params = KvParams(harvest.params)
        except MalformedParams as error:
            log.warning("decode's kv_transfer_params are not readable: nothing is reused", detail=str(error))
            return None
        held = known_tokens(params, harvest.prompt_tokens, harvest.tokens)
        if not held:
            return None
        return Record(
            worker=decode.name,
            generation=decode.generation,
            params=params.raw,
            fingerprint=fingerprint(held, call.scope),
            model=call.request.model,
            stored_at=arrival,
            deadline=arrival + self._settings.decoder_kv_blocks_ttl - self._settings.decoder_kv_blocks_margin,
            turn=report.turn,
            blocks=params.blocks,
            prefill=report.prefill,
        )

    def _missing(self, call: Call, decode: Worker, harvest: Harvest, mode: str) -> None:
        """Say once for each start of a worker why its answers cannot be reused."""
        stopped_on_text = call.request.stops_on_text and harvest.finished == "stop"
        if harvest.finished is None or stopped_on_text:
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

"""The prefill leg: compute the prompt, with what may be reused, and keep its blocks for decode."""

import time

import msgspec

from proxy.body import NULL
from proxy.call import Call, Report
from proxy.pool import Pool
from proxy.servers import forwarding
from proxy.telemetry import Metrics
from proxy.token_ids import TokenIds
from proxy.upstream import Answer, Failed, Refused, Upstream
from router.kv_params import Members, first_turn
from router.reuse import Reuse
from router.workers import Role, Worker


class Prefilled(msgspec.Struct, frozen=True):
    """The prompt's blocks wait on prefill, to be read once."""

    params: Members
    """What prefill said of them, for the decode leg."""
    ids: TokenIds | None
    """The prompt's token ids; None if they are not known."""
    prompt_tokens: int | None


class NothingToRead(msgspec.Struct, frozen=True):
    """Prefill answered without parameters: there is nothing for decode to read."""


class OtherTokens(msgspec.Struct, frozen=True):
    """Prefill worked on another prompt than the one that was verified."""


PrefillResult = Prefilled | NothingToRead | OtherTokens | Refused | Failed


class _Usage(msgspec.Struct):
    prompt_tokens: int = -1


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = NULL


class _Answer(msgspec.Struct):
    kv_transfer_params: Members | None = None
    prompt_token_ids: msgspec.Raw = NULL
    choices: list[_Choice] = []
    usage: _Usage | None = None

    def ids(self) -> msgspec.Raw | None:
        """Of the prompt: at the top in chat, in the choice in text completions."""
        for told in (self.prompt_token_ids, *(choice.prompt_token_ids for choice in self.choices)):
            if told != NULL:
                return told
        return None


_answer = msgspec.json.Decoder(_Answer).decode

_BYTES_PER_TOKEN = 4


class PrefillLeg:
    """Sends prefill legs."""

    def __init__(self, pool: Pool, upstream: Upstream, metrics: Metrics) -> None:
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics

    async def send(
        self,
        call: Call,
        report: Report,
        worker: Worker,
        ids: TokenIds | None,
        reuse: Reuse | None,
        patience: float,
    ) -> PrefillResult:
        """One prefill leg on ``worker``, given up after ``patience`` seconds.

        ``ids`` are the prompt's token ids where they are known already; ``reuse`` is what was verified
        against them.
        """
        if report.prefill:
            self._metrics.retries.labels(Role.PREFILL).inc()
        report.prefill, report.prefill_request_id = worker.name, report.next_leg()
        dialect = call.dialect
        told = ids if ids is not None and worker.honours_ids(dialect.name) else None
        params = reuse.params if reuse else first_turn()
        body = dialect.one_token_leg(call.request, params, told.json if told else None, tell_ids=told is None)
        began = time.perf_counter()
        with self._pool.leg(worker, _to_compute(body, ids, reuse)) as leg:
            answer = await self._upstream.post(
                forwarding(worker, call.request.forwarded),
                dialect.path,
                body,
                patience,
                request_id=report.prefill_request_id,
            )
            if reuse is None or not isinstance(answer, Failed) or answer.status is None:
                # A reuse that is answered with 5xx could not read decode's blocks: that is not this worker's fault.
                leg.ended(answer)
        if not isinstance(answer, Answer):
            return answer
        try:
            read = _answer(answer.body)
        except msgspec.DecodeError as error:
            return Failed(f"its answer is not as expected: {error}", answer.status)
        result = self._result(read, ids, told, reuse)
        if isinstance(result, Prefilled):
            report.prefill_seconds = time.perf_counter() - began
            if result.prompt_tokens is not None:
                self._metrics.prefilled(report.prefill_seconds, result.prompt_tokens, reuse.tokens if reuse else 0)
        return result

    def _result(
        self, answer: _Answer, ids: TokenIds | None, told: TokenIds | None, reuse: Reuse | None
    ) -> Prefilled | NothingToRead | OtherTokens:
        count = answer.usage.prompt_tokens if answer.usage else -1
        seen = answer.ids()
        if told is not None:
            # A worker that stopped taking given ids answers the prompt without history that it was sent.
            if count != len(told.numbers):
                return OtherTokens()
        elif reuse is not None and (ids is None or seen is None or not ids.are(seen)):
            return OtherTokens()
        if not answer.kv_transfer_params:
            return NothingToRead()
        found = told or (None if seen is None else TokenIds(seen))
        return Prefilled(answer.kv_transfer_params, found, count if count >= 0 else None)


def _to_compute(body: bytes, ids: TokenIds | None, reuse: Reuse | None) -> int:
    """Tokens that prefill has to compute; an estimate where nobody counted them."""
    if ids is None:
        return len(body) // _BYTES_PER_TOKEN
    return len(ids.numbers) - (reuse.tokens if reuse else 0)

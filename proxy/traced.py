"""The parts of the proxy that a trace tells of, each with spans around what it does."""

from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

from opentelemetry.trace import Span, SpanKind, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from metadata_store import Absent, Holding, LastTurn, Put, Record, Store, StoreError
from proxy.admission import Admission, Verdict
from proxy.answer import AfterAnswer, AnswerLeg
from proxy.call import Call, Reply, Report
from proxy.dialects import ClientRequest, Dialect
from proxy.harvest import Harvest
from proxy.otlp import Collector
from proxy.prefill import NothingToRead, OtherTokens, Prefilled, PrefillLeg, PrefillResult
from proxy.prompt_ids import PromptIds
from proxy.release import Releaser, Why
from proxy.routes.api import ApiEndpoint
from proxy.servers import Server, forwarding
from proxy.spans import TURN, TracedTurn, begin, current, fail, step, tell, tell_answer, tell_status
from proxy.token_ids import TokenIds
from proxy.traced_turn import TracedEndpoint
from proxy.traces import Traces
from proxy.upstream import Answer, Failed, Refused, Upstream
from router.reuse import Reuse
from router.workers import Worker

_Result = TypeVar("_Result")

_PROPAGATOR = TraceContextTextMapPropagator()


class TracedUpstream(Upstream):
    """Tells workers of which span a request is part; it makes none itself."""

    def _addressed(self, to: Server) -> Server:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers)
        return forwarding(to, headers)


class TracedAdmission(Admission):
    """``queue``: the wait of a turn that had to."""

    async def _wait(self, caller: str) -> Verdict:
        with step("queue") as span:
            verdict = await super()._wait(caller)
            if verdict is not Verdict.ADMITTED:
                fail(span, verdict)
            return verdict


class TracedPromptIds(PromptIds):
    """``render``: asking for a prompt's token ids, all whom it takes."""

    async def _asked(self, dialect: Dialect, request: ClientRequest) -> TokenIds | None:
        with step("render", SpanKind.CLIENT) as span:
            ids = await super()._asked(dialect, request)
            if ids is None:
                fail(span, "nobody told the token ids")
            else:
                tell(span, prompt_tokens=len(ids.numbers))
            return ids


class TracedPrefillLeg(PrefillLeg):
    """``prefill``: one prefill leg."""

    async def send(
        self,
        call: Call,
        report: Report,
        worker: Worker,
        ids: TokenIds | None,
        reuse: Reuse | None,
        patience: float,
    ) -> PrefillResult:
        """See ``PrefillLeg``."""
        reused = reuse.tokens if reuse else 0
        with step("prefill", SpanKind.CLIENT, worker=worker.name, reused_tokens=reused) as span:
            result = await super().send(call, report, worker, ids, reuse, patience)
            match result:
                case Prefilled():
                    tell(span, prompt_tokens=result.prompt_tokens)
                case NothingToRead():
                    fail(span, "it answered without kv_transfer_params")
                case OtherTokens():
                    fail(span, "it worked on another prompt")
                case _:
                    tell_answer(span, result)
            return result


class TracedAnswerLeg(AnswerLeg):
    """``decode``: the leg that answers, to the end of its answer, with the moment of its first token."""

    async def send(
        self, call: Call, report: Report, worker: Worker, body: bytes, remember: AfterAnswer
    ) -> Reply | Failed:
        """See ``AnswerLeg``."""
        turn = TURN.get()
        if turn is None:
            return await super().send(call, report, worker, body, remember)
        span = begin(turn, "decode", SpanKind.CLIENT, {"worker": worker.name, "role": worker.role})
        answer = _AnswerSpan(turn, span, remember)
        try:
            with current(span, ends=False):
                reply = await super().send(call, report, worker, body, answer.remember)
        except BaseException:
            span.end()
            raise
        if isinstance(reply, Failed):
            tell_answer(span, reply)
            span.end()
            return reply
        tell_status(span, reply.status)
        if isinstance(reply.body, bytes):
            span.end()
            return reply
        span.add_event("first token")
        # Closed last, when it is known whether the client got all of it.
        closing = ExitStack()
        closing.push(answer.closed)
        closing.push(reply.closing)
        reply.closing = closing
        return reply


class _AnswerSpan:
    """The span of an answer that comes in parts, until it is closed."""

    def __init__(self, turn: TracedTurn, span: Span, remember: AfterAnswer) -> None:
        self._turn = turn
        self._span = span
        self._above = get_current_span()
        self._remember = remember
        self._failure = "the stream broke off"

    async def remember(self, harvest: Harvest, mode: str) -> None:
        """What is done when the answer is complete; it is the turn's, not the leg's."""
        if self._span.is_recording():
            self._failure = "the worker ended it with an error" if harvest.failed else ""
            tell(self._span, output_tokens=len(harvest.generated) or None)
        with current(self._above, ends=False):
            await self._remember(harvest, mode)

    def closed(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the span; ``kind`` is what ended the relaying before its time."""
        if kind is not None:
            self._failure = "the answer was cut short"
            tell(self._span, cancelled=True)
        elif self._failure:
            fail(self._span, self._failure)
        self._turn.failure = self._failure
        self._span.end()


class TracedReleaser(Releaser):
    """``release``: giving blocks back, when it is its turn among releases."""

    async def _tell(self, worker: str, why: Why, body: bytes) -> Answer | Refused | Failed:
        with step("release", SpanKind.CLIENT, worker=worker, why=why) as span:
            answer = await super()._tell(worker, why, body)
            tell_answer(span, answer)
            return answer


class TracedStore:
    """A store, its calls ``store take`` and so on."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def open(self) -> None:
        """See ``Store``."""
        await self._store.open()

    async def close(self) -> None:
        """See ``Store``."""
        await self._store.close()

    async def take(self, key: str) -> Record | Absent:
        """See ``Store``."""
        return await _told("take", self._store.take(key))

    async def put(self, key: str, record: Record) -> Put:
        """See ``Store``."""
        return await _told("put", self._store.put(key, record))

    async def note_turn(self, key: str, last: LastTurn) -> LastTurn | None:
        """See ``Store``."""
        return await _told("note_turn", self._store.note_turn(key, last))

    async def restore(self, key: str, record: Record) -> bool:
        """See ``Store``."""
        return await _told("restore", self._store.restore(key, record))

    async def discard(self, key: str) -> Record | None:
        """See ``Store``."""
        return await _told("discard", self._store.discard(key))

    def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """See ``Store``."""
        return self._store.scan()


async def _told(name: str, call: Coroutine[object, object, _Result]) -> _Result:
    with step(f"store {name}", SpanKind.CLIENT) as span:
        try:
            return await call
        except StoreError as error:
            fail(span, str(error))
            raise


class Traced(Traces):
    """Turns are traced."""

    admission = TracedAdmission
    answer_leg = TracedAnswerLeg
    prefill_leg = TracedPrefillLeg
    prompt_ids = TracedPromptIds
    releaser = TracedReleaser
    upstream = TracedUpstream

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def store(self, store: Store) -> Store:
        """See ``Traces``."""
        return TracedStore(store)

    def endpoint(self, endpoint: ApiEndpoint, path: str) -> TracedEndpoint:
        """See ``Traces``."""
        return TracedEndpoint(endpoint, path, self._collector.tracer)

    def start(self) -> None:
        """See ``Traces``."""
        self._collector.start()

    async def stop(self, patience: float) -> None:
        """See ``Traces``."""
        await self._collector.stop(patience)

"""The leg that answers: a worker's answer or stream, made into what the client gets."""

import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial

import msgspec

from proxy.background import Background
from proxy.body import NotAnObject, parse, read
from proxy.call import Call, Reply, Report
from proxy.harvest import Harvest
from proxy.pool import Pool
from proxy.relay import Relay, names_role_only
from proxy.servers import forwarding
from proxy.settings import Settings
from proxy.sse import Events, data_of, each
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Failed, Refused, Upstream
from proxy.worker_stream import BrokenOff, Stream
from router.workers import Worker

AfterAnswer = Callable[[Harvest, str], Coroutine[object, None, None]]
"""What to do with what was learned from a complete answer; the text is ``stream`` or ``whole``."""


class AnswerLeg:
    """Sends the leg whose answer the client gets."""

    def __init__(
        self, settings: Settings, pool: Pool, upstream: Upstream, background: Background, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._upstream = upstream
        self._background = background
        self._metrics = metrics

    async def send(
        self, call: Call, report: Report, worker: Worker, body: bytes, remember: AfterAnswer
    ) -> Reply | Failed:
        """The reply, or why there is none; then nothing of it has reached the client.

        ``remember`` is awaited when the answer is complete, before the client is told that it is.
        """
        with ExitStack() as closing:
            leg = closing.enter_context(self._pool.leg(worker, report.prompt_tokens or 0))
            # An answer in one piece begins when it is complete: the turn's own limit is the only one that fits.
            streams = call.request.streams
            patience = self._settings.first_byte_timeout if streams else self._settings.turn_timeout
            if report.decode_request_id:
                self._metrics.retries.labels(worker.role).inc()
            report.decode_request_id = report.next_leg()
            report.decode_sent = time.perf_counter()
            answer = await self._upstream.stream(
                forwarding(worker, call.request.forwarded),
                call.dialect.path,
                body,
                first_byte_timeout=patience,
                gap_timeout=patience,
                request_id=report.decode_request_id,
            )
            harvest = Harvest(client_wants_ids=call.request.wants_token_ids)
            if not isinstance(answer, Stream):
                leg.ended(answer)
            match answer:
                case Failed():
                    return answer
                case Refused(status, content_type, content):
                    return Reply(status, content_type, content, report)
                case Answer(status, content_type, content):
                    seen = harvest.take(content)
                    # A client that leaves now must not keep its entry from being stored.
                    await call.interruption.uncut(_finish(report, harvest, remember, "whole"))
                    return Reply(status, content_type, content if seen is None else seen, report)
                case Stream():
                    following = Events(answer.next)
                    finish = partial(_finish, report, harvest, remember, "stream")
                    relay = Relay(answer, following, harvest, finish, call.interruption, self._background)
                    closing.callback(relay.left)
                    first = await _beginning(following)
                    leg.ended(first)
                    if isinstance(first, Failed):
                        return first
                    following.put_back(first)
                    # The engine sends its headers at once; only now it has begun to answer.
                    answer.allow_gaps(self._settings.gap_timeout)
                    report.first_part = time.perf_counter()
                    return Reply(answer.status, answer.content_type, relay, report, closing.pop_all())
        raise AssertionError("every kind of answer returns")


async def _finish(report: Report, harvest: Harvest, remember: AfterAnswer, mode: str) -> None:
    report.last_part = time.perf_counter()
    report.output_tokens = len(harvest.generated) or None
    await remember(harvest, mode)


async def _beginning(following: Events) -> bytes | Failed:
    """The events up to the first that says something, and what arrived with it; a failure if none comes, or an error.

    The engine answers 200, and in chat names its role, before it knows whether it could read prefill's
    blocks. The role comes together with the first token, so holding it back delays nothing.
    """
    begun = b""
    try:
        while arrived := await following.arrived():
            begun += arrived
            for event in each(arrived):
                if names_role_only(event):
                    continue
                error_code = _error_code(event)
                if error_code is not None and error_code >= 500:
                    return Failed(f"the stream began with an error, code {error_code}", error_code)
                return begun
    except BrokenOff as error:
        return Failed(str(error))
    return begun or Failed("the stream ended before it began", 200)


class _Error(msgspec.Struct):
    code: int | None = None


def _error_code(event: bytes) -> int | None:
    """The code in an error event; 500 where it has none; None for any other event."""
    if b'"error"' not in event:
        return None
    try:
        members = parse(data_of(event))
    except NotAnObject:
        return None
    if "choices" in members or "error" not in members:
        return None
    error = read(members, "error", _Error)
    return error.code if error is not None and error.code is not None else 500

"""The proxied endpoints, as plain ASGI: the framework's request machinery would cost as much as the rest."""

import asyncio
import time
import uuid
from collections.abc import Mapping

import structlog
from starlette.types import Receive, Scope, Send

from metadata_store.keys import conversation_key
from proxy import body
from proxy.call import Call, Reply, Report
from proxy.conversation import conversation_id
from proxy.dialects import Dialect
from proxy.errors import ApiError, bad_request, too_large
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.turn import Turns
from router.fingerprint import Scope as TokenScope

log = structlog.get_logger()

_LONGEST_REQUEST_ID = 256


class ClientGone(Exception):
    """The client closed its connection."""


class ApiEndpoint:
    """One API's endpoint: reads the request, has the turn served, sends the answer on."""

    def __init__(self, dialect: Dialect, settings: Settings, secret: bytes, turns: Turns, metrics: Metrics) -> None:
        self._dialect = dialect
        self._settings = settings
        self._secret = secret
        self._turns = turns
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the client's leaving ends it at any point."""
        report = Report()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = _request_id(headers)
        with self._metrics.running.track_inprogress():
            try:
                data = await _read_body(headers, receive, self._settings.max_body_bytes)
                serving = asyncio.ensure_future(self._serve(data, headers, request_id, report, send))
                await _unless_gone(serving, receive)
            except ApiError as error:
                await _send(_answer(error, report), request_id, send)
            except ClientGone:
                report.status = 499
            finally:
                self._told(request_id, report)

    async def _serve(
        self, data: bytes, headers: Mapping[str, str], request_id: str, report: Report, send: Send
    ) -> None:
        try:
            reply = await self._turns.serve(self._call(data, headers, request_id), report)
        except ApiError as error:
            reply = _answer(error, report)
        async with reply.closing:
            await _send(reply, request_id, send)

    def _call(self, data: bytes, headers: Mapping[str, str], request_id: str) -> Call:
        """The request as a turn wants it. Raises ``ApiError`` (400)."""
        try:
            members = body.parse(data)
        except body.NotAnObject as error:
            raise bad_request(f"The request body is not usable: {error}.") from error
        request = self._dialect.read(members)
        named = conversation_id(self._settings.conversation_id_sources, headers, members)
        caller = headers.get("authorization") or headers.get("x-api-key")
        return Call(
            dialect=self._dialect,
            request=request,
            request_id=request_id,
            key=None if named is None else conversation_key(self._secret, caller, request.model, named),
            scope=TokenScope(self._secret, request.model, request.cache_salt),
        )

    def _told(self, request_id: str, report: Report) -> None:
        """The turn's metrics and its line in the log."""
        now = time.perf_counter()
        endpoint, outcome = self._dialect.name, report.outcome
        first = None if report.first_part is None else report.first_part - report.started
        if report.status < 400 or report.status >= 500 or report.decode:
            self._metrics.turns.labels(endpoint, outcome, report.reason).inc()
            self._metrics.turn_seconds.labels(endpoint, outcome).observe(now - report.started)
        if first is not None:
            self._metrics.ttft.labels(endpoint, outcome).observe(first)
        if report.prompt_tokens is not None:
            self._metrics.prompt_tokens.labels("reused").inc(report.reused_tokens)
            self._metrics.prompt_tokens.labels("computed").inc(report.prompt_tokens - report.reused_tokens)
        log.info(
            "turn",
            request_id=request_id,
            endpoint=endpoint,
            status=report.status,
            outcome=outcome,
            reason=report.reason,
            turn=report.turn,
            prompt_tokens=report.prompt_tokens,
            reused_tokens=report.reused_tokens,
            prefill=report.prefill,
            decode=report.decode,
            ttft_seconds=None if first is None else round(first, 4),
            seconds=round(now - report.started, 4),
        )


async def _read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ``ApiError`` (413) as soon as it is known to be too long, and ``ClientGone``."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _unless_gone(serving: asyncio.Future[None], receive: Receive) -> None:
    """Wait for ``serving``; cancel it when the client goes away, and raise ``ClientGone``."""
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            raise ClientGone
        serving.result()
    finally:
        for task in (serving, leaving):
            if not task.done():
                task.cancel()
        await asyncio.gather(serving, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _answer(error: ApiError, report: Report) -> Reply:
    return Reply(error.status, "application/json", error.body(), report)


async def _send(reply: Reply, request_id: str, send: Send) -> None:
    report = reply.report
    report.status = reply.status
    headers = [
        (b"content-type", reply.content_type.encode("latin-1")),
        (b"x-request-id", request_id.encode("latin-1")),
        (b"x-turnback-reuse", report.outcome.encode()),
        (b"x-turnback-reason", report.reason.encode()),
        (b"x-turnback-reused-tokens", str(report.reused_tokens).encode()),
    ]
    if isinstance(reply.body, bytes):
        headers.append((b"content-length", str(len(reply.body)).encode()))
    else:
        # What sits between us and the client must not hold events back.
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if isinstance(reply.body, bytes):
        await send({"type": "http.response.body", "body": reply.body})
        return
    async for part in reply.body:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's own, else a new one."""
    return headers.get("x-request-id", "")[:_LONGEST_REQUEST_ID] or uuid.uuid4().hex

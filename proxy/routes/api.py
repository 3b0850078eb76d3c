"""The proxied endpoints, as plain ASGI: the framework's request machinery would cost as much as the rest."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

import structlog
from starlette.types import Receive, Scope, Send

from metadata_store.keys import conversation_key
from proxy import body
from proxy.account import Account
from proxy.admission import Admission
from proxy.call import REPORT, Call, Reply, Report
from proxy.conversation import conversation_id, credential
from proxy.dialects import Dialect
from proxy.drain import Drain
from proxy.errors import ApiError, bad_request, draining, internal, too_large, took_too_long
from proxy.interruption import Cause, Interruption
from proxy.reuse_switch import ReuseSwitch
from proxy.settings import Settings
from proxy.trace_context import trace_context
from proxy.turn import Turns
from router.fingerprint import Scope as TokenScope

log = structlog.get_logger()

Headers = list[tuple[bytes, bytes]]

_LONGEST_REQUEST_ID = 256

_SHORT_HASH = 12
"""Hex digits of a conversation's key that are told: enough to find its turns by."""

_FAREWELL_SECONDS = 2.0
"""For a last event to a client that may have stopped to read."""


class ClientGone(Exception):
    """The client closed its connection."""


class Response:
    """What the client gets, and how far it has got."""

    def __init__(self, send: Send, request_id: str, report: Report) -> None:
        self._send = send
        self._request_id = request_id
        self._report = report
        self._streams = False
        self.begun = False

    async def send(self, reply: Reply) -> None:
        """All of ``reply``."""
        if isinstance(reply.body, bytes):
            await self._whole(reply.status, reply.content_type, reply.body, [])
            return
        self._streams = True
        # What sits between us and the client must not hold events back.
        extra = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._start(reply.status, reply.content_type, extra)
        parts = reply.body
        while not parts.over:
            part = await parts.next()
            await self._send({"type": "http.response.body", "body": part, "more_body": not parts.over})

    async def refuse(self, error: ApiError, *, ending: bool) -> None:
        """An answer of our own; ``ending`` if the client had better open its next connection elsewhere."""
        extra = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
        if ending:
            extra.append((b"connection", b"close"))
        await self._whole(error.status, "application/json", error.body(), extra)

    async def break_off(self, error: ApiError) -> None:
        """End what has begun such that nobody takes it for complete."""
        if self._streams:
            await self._send({"type": "http.response.body", "body": error.event()})

    async def _whole(self, status: int, content_type: str, body: bytes, extra: Headers) -> None:
        await self._start(status, content_type, [*extra, (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, content_type: str, extra: Headers) -> None:
        report = self._report
        report.status = status
        headers = [
            (b"content-type", content_type.encode("latin-1")),
            (b"x-request-id", self._request_id.encode("latin-1")),
            *extra,
        ]
        if report.outcome is not None and report.reason is not None:
            headers += [
                (b"x-turnback-reuse", report.outcome.encode()),
                (b"x-turnback-reason", report.reason.encode()),
                (b"x-turnback-reused-tokens", str(report.reused_tokens).encode()),
            ]
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class ApiEndpoint:
    """One API's endpoint: reads the request, has the turn served, sends the answer on."""

    def __init__(
        self,
        dialect: Dialect,
        settings: Settings,
        secret: bytes,
        turns: Turns,
        admission: Admission,
        drain: Drain,
        switch: ReuseSwitch,
        account: Account,
    ) -> None:
        self._dialect = dialect
        self._settings = settings
        self._secret = secret
        self._turns = turns
        self._admission = admission
        self._drain = drain
        self._switch = switch
        self._account = account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the client's leaving ends it at any point."""
        report = scope[REPORT] = Report()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id", "")[:_LONGEST_REQUEST_ID] or report.unique
        response = Response(send, request_id, report)
        try:
            data = await _read_body(headers, receive, self._settings.max_body_bytes)
            with Interruption(self._settings.turn_timeout) as interruption:
                call = self._call(data, headers, request_id, interruption)
                report.conversation = (call.key or "")[:_SHORT_HASH]
                watching = asyncio.create_task(_watch(receive, interruption))
                try:
                    await self._serve(call, _caller(scope, headers), report, response)
                finally:
                    watching.cancel()
        except ApiError as error:
            await response.refuse(error, ending=self._drain.began)
        except ClientGone:
            report.status = 499
        except Exception:
            log.exception("a turn failed by a fault of Turnback's own", request_id=request_id)
            await (response.break_off(internal()) if response.begun else response.refuse(internal(), ending=False))
        finally:
            self._account.of(self._dialect.name, request_id, report)

    async def _serve(self, call: Call, caller: str, report: Report, response: Response) -> None:
        """The turn, from its place in the queue to the last byte, within its time.

        Raises ``ApiError``, and ``ClientGone`` when what ran for the client has ended.
        """
        try:
            await self._admission.enter(caller)
            try:
                report.queue_seconds = time.perf_counter() - report.started
                self._drain.enter(call.interruption)
                reply = await self._turns.serve(call, report)
                with reply.closing:
                    await response.send(reply)
            finally:
                self._drain.leave(call.interruption)
                self._admission.leave()
        except asyncio.CancelledError:
            if not call.interruption.was_it():
                raise
            if call.interruption.cause is Cause.CLIENT_LEFT:
                raise ClientGone from None
            error = draining() if self._drain.began else took_too_long(self._settings.turn_timeout)
            if not response.begun:
                raise error from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await response.break_off(error)

    def _call(self, data: bytes, headers: Mapping[str, str], request_id: str, interruption: Interruption) -> Call:
        """The request as a turn wants it. Raises ``ApiError`` (400)."""
        try:
            members = body.parse(data)
        except body.NotAnObject as error:
            raise bad_request(f"The request body is not usable: {error}.") from error
        authorization = headers.get("authorization") if self._settings.forward_authorization else None
        # Unless this router makes spans itself, the workers' spans are right below the client's.
        forwarded = trace_context(headers) | ({"Authorization": authorization} if authorization else {})
        request = self._dialect.read(members, forwarded)
        named = conversation_id(self._settings.conversation_id_sources, headers, members)
        caller = credential(headers)
        return Call(
            dialect=self._dialect,
            request=request,
            request_id=request_id,
            key=None if named is None else conversation_key(self._secret, caller, request.model, named),
            scope=TokenScope(self._secret, request.model, request.cache_salt),
            reuse=self._switch.reuse(headers),
            interruption=interruption,
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


async def _watch(receive: Receive, interruption: Interruption) -> None:
    """Ends the turn when its client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    interruption.interrupt(Cause.CLIENT_LEFT)


def _caller(scope: Scope, headers: Mapping[str, str]) -> str:
    """Who is served in turns with others: a credential, else an address."""
    if (known := credential(headers)) is not None:
        return known
    client = scope.get("client")
    return client[0] if client else ""

"""A worker over HTTP: send something, get a typed answer or a typed failure. Nothing is raised but cancellation."""

import asyncio
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

import msgspec

from proxy.connections import Connections, NoConnection
from proxy.errors import bad_request
from proxy.http_answer import HttpAnswer
from proxy.http_url import Address
from proxy.request_head import RequestHeads, UnsafeHeader
from proxy.servers import Forwarding, Server
from proxy.wait import Wait
from proxy.worker_connection import Until, WorkerConnection
from proxy.worker_stream import Stream

_JSON = "application/json"

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}


class Answer(msgspec.Struct, frozen=True):
    """A whole answer with status 2xx."""

    status: int
    content_type: str
    body: bytes


class Refused(msgspec.Struct, frozen=True):
    """The worker's own 4xx: it is well, the request is not."""

    status: int
    content_type: str
    body: bytes


class Failed(msgspec.Struct, frozen=True):
    """No usable answer: 5xx, no connection, or no answer in time."""

    detail: str
    status: int | None = None
    """None if nothing came back at all."""
    sent: bool = True
    """Whether the worker may have got the request. Not if no connection was made."""


class _Route:
    """What it takes to send requests to one server, and who waits for it."""

    def __init__(self, address: Address, connections: Connections, headers: Mapping[str, str]) -> None:
        self.connections = connections
        self.heads = RequestHeads(address, headers)
        self.waits: set[Wait] = set()
        self.streams: set[Stream] = set()


class _Sent(NamedTuple):
    """A request that was written."""

    connection: WorkerConnection
    answer: HttpAnswer
    on_kept: bool
    """Whether the connection had carried others before."""


class Upstream:
    """HTTP towards all workers. A connection that carried a request is kept for the next one, for a while.

    Nothing that was written is sent again by itself, but for what only asks (``get``), where a kept connection turns
    out to have been closed.
    """

    def __init__(self, connect_timeout: float, worker_api_key: str | None) -> None:
        """``connect_timeout``: seconds."""
        self._connect_timeout = connect_timeout
        self._headers = dict(_HEADERS)
        if worker_api_key is not None:
            self._headers["Authorization"] = f"Bearer {worker_api_key}"
        self._tls: ssl.SSLContext | None = None
        self._routes: dict[str, _Route] = {}
        """By the servers' URLs."""
        self._entered = False

    def stop_waiting(self, to: Server) -> None:
        """Whoever waits for ``to`` to begin to answer gets a failure now: it is not there any more."""
        if (route := self._routes.get(to.url)) is not None:
            for wait in route.waits:
                wait.stop()

    def give_up_earlier(self, to: Server, moment: float) -> None:
        """Whoever began before ``moment``, of the loop's clock, to wait for ``to`` or to read a stream of it, is told
        that it broke off: what was asked then is gone.

        What was asked later may be under way on whatever came in its place.
        """
        if (route := self._routes.get(to.url)) is None:
            return
        for wait in route.waits:
            if wait.begun < moment:
                wait.stop()
        for stream in list(route.streams):
            if stream.begun < moment:
                stream.close()

    async def __aenter__(self) -> "Upstream":
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        routes, self._routes = self._routes, {}
        for route in routes.values():
            await route.connections.close()

    async def post(
        self, to: Server, path: str, body: bytes, timeout: float, request_id: str = ""
    ) -> Answer | Refused | Failed:
        """Send ``body`` and read the whole answer, all within ``timeout`` seconds.

        An answer that came when the caller was being cancelled is given all the same; it is the caller's next wait
        that raises the cancellation.
        """
        route = self._route(to)
        with Wait(timeout, route.waits) as wait:
            sent = await self._post(route, to, path, body, request_id, wait)
            return await _whole(sent, wait) if isinstance(sent, _Sent) else sent

    async def get(self, to: Server, path: str, timeout: float) -> Answer | Refused | Failed:
        """Read the whole answer within ``timeout`` seconds."""
        route, to = self._route(to), self._addressed(to)
        with Wait(timeout, route.waits) as wait:
            try:
                head = route.heads.get(path, *_headers(to))
            except UnsafeHeader as error:
                return _unsafe(error)
            while True:
                sent = await _send(route, head, b"", wait)
                if isinstance(sent, Failed):
                    return sent
                result = await _whole(sent, wait)
                if not (sent.on_kept and sent.answer.unanswered):
                    return result

    async def stream(
        self, to: Server, path: str, body: bytes, *, first_byte_timeout: float, gap_timeout: float, request_id: str
    ) -> Answer | Stream | Refused | Failed:
        """Send ``body``; a ``Stream`` where the answer is one (``text/event-stream``), else the whole answer."""
        route = self._route(to)
        with Wait(first_byte_timeout, route.waits) as wait:
            sent = await self._post(route, to, path, body, request_id, wait)
            if not isinstance(sent, _Sent):
                return sent
            if (failed := await _answered(sent, wait, Until.HEAD)) is not None:
                return failed
            connection, answer, _ = sent
            if answer.status < 300 and answer.content_type.partition(";")[0].strip().lower() == "text/event-stream":
                return Stream(connection, answer, gap_timeout, route.streams)
            wait.go_on(gap_timeout)
            return await _whole(sent, wait)

    async def _post(
        self, route: _Route, to: Server, path: str, body: bytes, request_id: str, wait: Wait
    ) -> _Sent | Refused | Failed:
        try:
            head = route.heads.post(path, *_headers(self._addressed(to)), request_id, len(body))
        except UnsafeHeader as error:
            return _unsafe(error)
        return await _send(route, head, body, wait)

    def _addressed(self, to: Server) -> Server:
        """``to``, and what it is to be sent beside."""
        return to

    def _route(self, to: Server) -> _Route:
        if (route := self._routes.get(to.url)) is None:
            if not self._entered:
                raise RuntimeError("Upstream is used before it was entered, or after it was left")
            address = Address.of(to.url)
            connections = Connections(address, self._connect_timeout, self._tls_context)
            route = self._routes[to.url] = _Route(address, connections, self._headers)
        return route

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


async def _send(route: _Route, head: bytes, body: bytes, wait: Wait) -> _Sent | Failed:
    if wait.over:
        return Failed(_too_late(wait), sent=False)
    connection = route.connections.kept()
    on_kept = connection is not None
    if connection is None:
        try:
            async with wait.connecting():
                connection = await route.connections.opened()
        except NoConnection as error:
            return Failed(str(error), sent=False)
        except TimeoutError:
            return Failed(_too_late(wait), sent=False)
        if wait.over:
            # Stopped in the very moment in which it was made.
            route.connections.free(connection)
            return Failed(_too_late(wait), sent=False)
    wait.on = connection
    return _Sent(connection, connection.ask(head, body), on_kept)


async def _answered(sent: _Sent, wait: Wait, until: Until) -> Failed | None:
    """None when so much of the answer is there. If it is not to be, the connection is closed."""
    connection, answer, _ = sent
    try:
        while not (answer.over or answer.broken or wait.over or (until is Until.HEAD and answer.status)):
            await connection.more(until)
    except asyncio.CancelledError:
        if not answer.over:
            connection.drop(answer)
            raise
        # It came in the very moment of the cancellation, and may name what the worker keeps: it is not to be lost.
        _cancel_at_the_next_wait()
    if answer.broken:
        return Failed(f"the connection broke: {answer.broken}")
    if answer.over or (until is Until.HEAD and answer.status):
        return None
    connection.drop(answer)
    return Failed(_too_late(wait))


def _cancel_at_the_next_wait() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.cancel()
        # Whoever cancelled did so once.
        task.uncancel()


async def _whole(sent: _Sent, wait: Wait) -> Answer | Refused | Failed:
    if (failed := await _answered(sent, wait, Until.END)) is not None:
        return failed
    answer = sent.answer
    content_type = answer.content_type or _JSON
    if answer.status < 300:
        return Answer(answer.status, content_type, answer.take())
    if 400 <= answer.status < 500:
        return Refused(answer.status, content_type, answer.take())
    # Not the body: it may quote the prompt.
    return Failed(f"status {answer.status}", answer.status)


def _headers(to: Server) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """A server's own, and what it is forwarded."""
    return to.headers, to.forwarded if isinstance(to, Forwarding) else {}


def _too_late(wait: Wait) -> str:
    return f"no answer within {wait.seconds:g} s, or the worker went down"


def _unsafe(error: UnsafeHeader) -> Refused:
    """What a worker would say if it were asked: no other would take it either."""
    return Refused(400, _JSON, bad_request(f"The request cannot be sent on: {error}.").body())

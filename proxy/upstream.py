"""A worker over HTTP: send something, get a typed answer or a typed failure. Nothing is raised but cancellation."""

import ssl
from collections.abc import Mapping
from types import TracebackType

from proxy.connections import Connections
from proxy.exchange import (
    Answer,
    Begun,
    Failed,
    Refused,
    Request,
    Route,
    begin,
    repeatable_answer,
    streamed_answer,
    too_late,
    unsafe,
    whole_answer,
)
from proxy.http_url import Address
from proxy.request_head import UnsafeHeader
from proxy.servers import Forwarding, Server
from proxy.worker_stream import Stream

__all__ = ["Answer", "Failed", "Refused", "Upstream"]

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}


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
        self._routes: dict[str, Route] = {}
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
        return await whole_answer(route, self._post(route, to, path, body, request_id, timeout), timeout)

    async def get(self, to: Server, path: str, timeout: float) -> Answer | Refused | Failed:
        """Read the whole answer within ``timeout`` seconds."""
        route, to = self._route(to), self._addressed(to)
        try:
            request = Request(route.heads.get(path, *_headers(to)), b"")
        except UnsafeHeader as error:
            return unsafe(error)
        return await repeatable_answer(route, request, timeout)

    async def stream(
        self, to: Server, path: str, body: bytes, *, first_byte_timeout: float, gap_timeout: float, request_id: str
    ) -> Answer | Stream | Refused | Failed:
        """Send ``body``; a ``Stream`` where the answer is one (``text/event-stream``), else the whole answer."""
        route = self._route(to)
        begun = self._post(route, to, path, body, request_id, first_byte_timeout)
        return await streamed_answer(route, begun, first_byte_timeout, gap_timeout)

    def _post(self, route: Route, to: Server, path: str, body: bytes, request_id: str, seconds: float) -> Begun:
        try:
            head = route.heads.post(path, *_headers(self._addressed(to)), request_id, len(body))
        except UnsafeHeader as error:
            return unsafe(error)
        if seconds <= 0:
            return too_late(seconds)
        return begin(route, Request(head, body))

    def _addressed(self, to: Server) -> Server:
        """``to``, and what it is to be sent beside."""
        return to

    def _route(self, to: Server) -> Route:
        if (route := self._routes.get(to.url)) is None:
            if not self._entered:
                raise RuntimeError("Upstream is used before it was entered, or after it was left")
            address = Address.of(to.url)
            connections = Connections(address, self._connect_timeout, self._tls_context)
            route = self._routes[to.url] = Route(address, connections, self._headers)
        return route

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


def _headers(to: Server) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """A server's own, and what it is forwarded."""
    return to.headers, to.forwarded if isinstance(to, Forwarding) else {}

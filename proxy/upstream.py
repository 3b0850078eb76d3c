"""A worker over HTTP: send something, get a typed answer or a typed failure. Nothing is raised but cancellation."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.tracing import Trace
from yarl import URL

from proxy.worker_stream import Stream

JSON_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class Server(Protocol):
    """Where a request goes: a worker, or a server that only renders."""

    @property
    def url(self) -> str:
        """Without a slash at its end."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request to it carries, besides what requests to all of them do."""


@dataclass(frozen=True)
class Forwarding:
    """A server, and headers of a client's that a request to it carries besides, or instead of, its own."""

    server: Server
    forwarded: Mapping[str, str]

    @property
    def url(self) -> str:
        """See ``Server``."""
        return self.server.url

    @property
    def headers(self) -> Mapping[str, str]:
        """See ``Server``."""
        return {**self.server.headers, **self.forwarded}


def forwarding(server: Server, forwarded: Mapping[str, str]) -> Server:
    """``server``, to be sent ``forwarded`` too."""
    return Forwarding(server, forwarded) if forwarded else server


@dataclass(frozen=True)
class RenderServer:
    """A server that is no worker, and is sent what all are."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A whole answer with status 2xx."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True)
class Refused:
    """The worker's own 4xx: it is well, the request is not."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True)
class Failed:
    """No usable answer: 5xx, no connection, or no answer in time."""

    detail: str
    status: int | None = None
    """None if nothing came back at all."""
    sent: bool = True
    """Whether the worker may have got the request. Not if no connection was made."""


_CONNECTING_AT_ONCE = 64


class _PacedConnector(aiohttp.TCPConnector):
    """Makes few connections to a server at a time.

    Where thousands are begun in one moment, the event loop is busy with beginning them for so long that the time to
    connect is over before it looks at those that are made.
    """

    def __init__(self) -> None:
        # vLLM closes idle connections after 5 s: never use one that is about to be closed.
        super().__init__(limit=0, keepalive_timeout=4.0, ttl_dns_cache=60)
        # By server: one that does not answer must not keep the others waiting.
        self._pace: defaultdict[ConnectionKey, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_CONNECTING_AT_ONCE)
        )

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with self._pace[req.connection_key]:
            return await super()._create_connection(req, traces, timeout)


class Upstream:
    """HTTP towards all workers, with one pool of connections."""

    def __init__(self, connect_timeout: float, worker_api_key: str | None) -> None:
        self._connect_timeout = connect_timeout
        self._headers = dict(JSON_HEADERS)
        if worker_api_key is not None:
            self._headers["Authorization"] = f"Bearer {worker_api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}
        """Parsed, by their text: there are few, and every leg needs one."""
        self._waits: dict[str, set[_Wait]] = {}
        self._streams: dict[str, set[Stream]] = {}

    def stop_waiting(self, to: Server) -> None:
        """Whoever waits for ``to`` to begin to answer gets a failure now: it is not there any more."""
        for wait in self._waits.get(to.url, ()):
            wait.stop()

    def give_up_earlier(self, to: Server, moment: float) -> None:
        """Whoever began before ``moment``, of the loop's clock, to wait for ``to`` or to read a stream of it, is told
        that it broke off: what was asked then is gone.

        What was asked later may be under way on whatever came in its place.
        """
        for wait in self._waits.get(to.url, ()):
            if wait.begun < moment:
                wait.stop()
        for stream in list(self._streams.get(to.url, ())):
            if stream.begun < moment:
                stream.close()

    async def __aenter__(self) -> "Upstream":
        self._session = aiohttp.ClientSession(
            connector=_PacedConnector(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers=self._headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(
        self, to: Server, path: str, body: bytes, timeout: float, request_id: str = ""
    ) -> Answer | Refused | Failed:
        """Send ``body`` and read the whole answer, all within ``timeout`` seconds."""
        return await self._whole("POST", to, path, body, timeout, request_id)

    async def get(self, to: Server, path: str, timeout: float) -> Answer | Refused | Failed:
        """Read the whole answer within ``timeout`` seconds."""
        return await self._whole("GET", to, path, None, timeout, "")

    async def stream(
        self, to: Server, path: str, body: bytes, *, first_byte_timeout: float, gap_timeout: float, request_id: str
    ) -> Answer | Stream | Refused | Failed:
        """Send ``body``; a ``Stream`` where the answer is one (``text/event-stream``), else the whole answer."""
        try:
            async with self._within(to, first_byte_timeout):
                response = await self._send("POST", to, path, body, request_id)
        except (aiohttp.ClientError, OSError) as error:
            return _unreachable(error, first_byte_timeout)
        if response.status < 300 and response.content_type == "text/event-stream":
            return Stream(response, gap_timeout, self._streams.setdefault(to.url, set()))
        try:
            async with self._within(to, gap_timeout):
                return await _read(response)
        except (aiohttp.ClientError, OSError) as error:
            return _unreachable(error, gap_timeout)
        finally:
            response.release()

    async def _whole(
        self, method: str, to: Server, path: str, body: bytes | None, timeout: float, request_id: str
    ) -> Answer | Refused | Failed:
        try:
            async with self._within(to, timeout):
                response = await self._send(method, to, path, body, request_id)
                try:
                    return await _read(response)
                finally:
                    response.release()
        except (aiohttp.ClientError, OSError) as error:
            return _unreachable(error, timeout)

    def _within(self, to: Server, seconds: float) -> "_Wait":
        """Bounds a wait for ``to`` in time, and lets ``stop_waiting`` and ``give_up_earlier`` end it."""
        return _Wait(seconds, self._waits.setdefault(to.url, set()))

    async def _send(
        self, method: str, to: Server, path: str, body: bytes | None, request_id: str
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("Upstream is used before it was entered")
        headers = {**to.headers, "X-Request-Id": request_id} if request_id else to.headers
        address = to.url + path
        if (url := self._urls.get(address)) is None:
            url = self._urls[address] = URL(address)
        return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)


class _Wait:
    """A wait that is bounded in time, and one of ``others`` while it lasts. Raises ``TimeoutError``."""

    def __init__(self, seconds: float, others: set["_Wait"]) -> None:
        self.begun = asyncio.get_running_loop().time()
        self._limit = asyncio.timeout(seconds)
        self._others = others

    def stop(self) -> None:
        """The time is over now."""
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._others.add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._others.discard(self)
        await self._limit.__aexit__(kind, error, trace)


async def _read(response: aiohttp.ClientResponse) -> Answer | Refused | Failed:
    body = await response.read()
    content_type = response.headers.get("Content-Type", "application/json")
    if response.status < 300:
        return Answer(response.status, content_type, body)
    if 400 <= response.status < 500:
        return Refused(response.status, content_type, body)
    # Not the body: it may quote the prompt.
    return Failed(f"status {response.status}", response.status)


def _unreachable(error: BaseException, timeout: float) -> Failed:
    """Not the error's own text where it could quote what was sent or answered."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return Failed("no connection in time", sent=False)
        case aiohttp.ClientConnectorError():
            return Failed(f"no connection: {error.os_error.strerror or error.os_error}", sent=False)
        case TimeoutError():
            return Failed(f"no answer within {timeout:g} s, or the worker went down")
    return Failed(f"the connection broke: {type(error).__name__}")

"""The connections to one server: those that wait for work, and how more are made."""

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from proxy.http_url import Address
from proxy.worker_connection import WorkerConnection

_KEPT_SECONDS = 4.0
"""vLLM closes idle connections after 5 s: one that is about to be closed is never used."""

_CONNECTING_AT_ONCE = 64
"""Where thousands are begun in one moment, the event loop is busy with beginning them for so long that the time to
connect is over before it looks at those that are made."""

_NAME_SECONDS = 60.0
"""For which the addresses behind a name are taken to be the same, while they can be connected to."""

_NEXT_ADDRESS_SECONDS = 0.25
"""After which the next address of a name is tried beside the one that did not answer yet."""


class NoConnection(Exception):
    """None could be made; the text says why."""


class Connections:
    """All connections to one server, however many."""

    def __init__(self, address: Address, connect_timeout: float, tls: Callable[[], ssl.SSLContext]) -> None:
        """``connect_timeout``: seconds for each, the name's resolution and TLS included."""
        self._address = address
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._pace = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._open: set[WorkerConnection] = set()
        self._idle: deque[WorkerConnection] = deque()
        """Those that wait; the one that does for longest comes first."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._found: list[AddrInfoType] = []
        self._found_at = 0.0

    def kept(self) -> WorkerConnection | None:
        """One that waits for work, and does no more; None if there is none that can be relied on."""
        while self._idle:
            # The newest: the others can go, if so many are not needed any more.
            connection = self._idle.pop()
            if connection.usable and self._loop.time() - connection.idle_since < _KEPT_SECONDS:
                return connection
            connection.close()
        return None

    async def opened(self) -> WorkerConnection:
        """A new one. Raises ``NoConnection``; only then, or if it is cancelled, nothing was made."""
        async with self._pace:
            try:
                async with asyncio.timeout(self._connect_timeout):
                    connection = await self._open_one()
            except TimeoutError as error:
                self._found = []
                raise NoConnection("no connection in time") from error
            except (OSError, RuntimeError, UnicodeError) as error:
                # uvloop tells some failures of a socket by the second, and a name that can be none is the third.
                self._found = []
                raise NoConnection(f"no connection: {_reason(error)}") from error
        if self._closed:
            connection.close()
        if not connection.usable:
            raise NoConnection("no connection: it was closed at once")
        return connection

    async def close(self) -> None:
        """Close all; what they carry breaks off."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.close()
        await self._none_open.wait()

    def free(self, connection: WorkerConnection) -> None:
        """See ``Keeper``."""
        if self._closed:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_KEPT_SECONDS, self._sweep)

    def lost(self, connection: WorkerConnection) -> None:
        """See ``Keeper``."""
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()

    async def _open_one(self) -> WorkerConnection:
        address = self._address
        # The loop's own connecting tries one address after the other where the loop is uvloop.
        connected = await aiohappyeyeballs.start_connection(
            await self._resolved(), happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=self._loop
        )
        connection = WorkerConnection(self)
        taken_over = False

        def take_over() -> WorkerConnection:
            nonlocal taken_over
            taken_over = True
            return connection

        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.create_connection(
                take_over,
                sock=connected,
                ssl=self._tls() if address.tls else None,
                server_hostname=address.host.rstrip(".") if address.tls else None,
            )
        except BaseException:
            # Once the loop has a transport for it, the socket is not ours to close.
            connection.close() if taken_over else connected.close()
            raise
        if connection.usable:
            # Not when it is made: of one whose making is cancelled right then, uvloop does not tell that it is lost.
            self._open.add(connection)
            self._none_open.clear()
        return connection

    async def _resolved(self) -> list[AddrInfoType]:
        host, port = self._address.host, self._address.port
        now = self._loop.time()
        if self._found and now - self._found_at < _NAME_SECONDS:
            return self._found
        try:
            # An address is no name: nothing is to be asked, and nobody waits.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        self._found, self._found_at = cast(list[AddrInfoType], found), now
        return self._found

    def _sweep(self) -> None:
        """Close those that waited for too long: one timer for all."""
        idle, now = self._idle, self._loop.time()
        while idle and (not idle[0].usable or now - idle[0].idle_since >= _KEPT_SECONDS):
            idle.popleft().close()
        self._sweeping = self._loop.call_at(idle[0].idle_since + _KEPT_SECONDS, self._sweep) if idle else None


def _reason(error: OSError | RuntimeError | UnicodeError) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return error.verify_message
        case ssl.SSLError() | socket.gaierror():
            # Their numbers are not the system's.
            return error.strerror or str(error)
        case OSError(errno=int(number)):
            return os.strerror(number)
    return str(error)

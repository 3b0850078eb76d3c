"""A worker that sends given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from proxy.servers import RenderServer

Script = Callable[["Connection"], Awaitable[None]]

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass
class Connection:
    """One connection, as the worker sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[bytes]

    async def request(self) -> bytes:
        """The next request, whole."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        request = head + (await self.reader.readexactly(int(length[1])) if length else b"")
        self.requests.append(request)
        return request

    def send(self, data: bytes) -> None:
        """At once, as far as the client takes it."""
        self.writer.write(data)

    async def until_closed(self) -> None:
        """Wait until the client closes."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(2**16):
                pass

    def reset(self) -> None:
        """Break it off, as when a process is killed that had something unread."""
        connected = self.writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class ScriptedWorker:
    """The worker, and what it saw."""

    server: RenderServer
    requests: list[bytes] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    over: list[Connection] = field(default_factory=list)
    """Those whose script came to its end."""


@contextlib.asynccontextmanager
async def worker(
    *scripts: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", path: str = ""
) -> AsyncIterator[ScriptedWorker]:
    """Its first connection follows the first of ``scripts``, and so on; all further ones the last."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        connection = Connection(reader, writer, seen.requests)
        seen.connections.append(connection)
        try:
            # asyncio's streams complain of a cancelled task: it is over like any other.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await scripts[min(len(seen.connections), len(scripts)) - 1](connection)
            seen.over.append(connection)
        finally:
            serving.discard(task)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    seen = ScriptedWorker(RenderServer(f"{'https' if tls else 'http'}://{host}:{port}{path}"))
    try:
        yield seen
    finally:
        listening.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def answering(*answers: bytes) -> Script:
    """Answers one request after the other, and then waits for the client to close."""

    async def script(connection: Connection) -> None:
        for answer in answers:
            await connection.request()
            connection.send(answer)
        await connection.until_closed()

    return script


def answering_and_closing(answer: bytes) -> Script:
    """Answers one request, and closes."""

    async def script(connection: Connection) -> None:
        await connection.request()
        connection.send(answer)

    return script


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer with ``Content-Length``."""
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A part of an answer with ``Transfer-Encoding: chunked``; its end, if it is empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)

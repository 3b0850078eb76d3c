"""Streams of workers that stall: what is left of them when they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from proxy.servers import RenderServer
from proxy.upstream import Upstream
from proxy.worker_stream import BrokenOff, Stream

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@contextlib.asynccontextmanager
async def worker_that_stalls() -> AsyncIterator[RenderServer]:
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"data: 1\n\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield RenderServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        for writer in writers:
            writer.close()
        server.close()


async def opened(upstream: Upstream, worker: RenderServer, gap_timeout: float) -> Stream:
    stream = await upstream.stream(worker, "/", b"{}", first_byte_timeout=10, gap_timeout=gap_timeout, request_id="r")
    assert isinstance(stream, Stream)
    return stream


async def read_to_the_break(stream: Stream) -> str:
    assert await stream.next() == b"data: 1\n\n"
    with pytest.raises(BrokenOff) as broken:
        await stream.next()
    return str(broken.value)


async def test_streams_that_stalled_do_not_stay_in_memory() -> None:
    async with worker_that_stalls() as worker, Upstream(10, None) as upstream:
        left = []
        for _ in range(2):
            stream = await opened(upstream, worker, gap_timeout=0.05)
            assert "nothing for 0.05 s" in await read_to_the_break(stream)
            stream.close()
            left.append(weakref.ref(stream))
            del stream
        gc.collect()
        assert [ref() for ref in left] == [None, None]


async def test_a_stream_that_nobody_reads_for_long_is_not_broken_off() -> None:
    async with worker_that_stalls() as worker, Upstream(10, None) as upstream:
        stream = await opened(upstream, worker, gap_timeout=0.05)
        await asyncio.sleep(0.2)
        assert await stream.next() == b"data: 1\n\n"
        stream.close()


async def test_a_stream_that_is_closed_unread_leaves_no_timer() -> None:
    async with worker_that_stalls() as worker, Upstream(10, None) as upstream:
        stream = await opened(upstream, worker, gap_timeout=60)
        stream.close()
        stream.close()
        left = weakref.ref(stream)
        del stream
        gc.collect()
        assert left() is None, "a timer that runs on would hold it"

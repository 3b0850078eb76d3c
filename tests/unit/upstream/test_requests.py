"""Asking a worker: whatever it does, an answer is whole, or a failure, and no connection is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.servers import RenderServer, forwarding
from proxy.traced import TracedUpstream
from proxy.upstream import Answer, Failed, Refused, Upstream
from proxy.worker_connection import WorkerConnection
from proxy.worker_stream import BrokenOff, Stream
from tests.running import eventually
from tests.unit.upstream.scripted_worker import (
    STREAM_HEAD,
    Connection,
    Script,
    ScriptedWorker,
    answering,
    answering_and_closing,
    chunk,
    whole,
    worker,
)

JSON = b"Content-Type: application/json"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(10, "key") as upstream:
        yield upstream


async def silent(connection: Connection) -> None:
    await connection.request()
    await connection.until_closed()


async def stream(upstream: Upstream, to: ScriptedWorker, gap_timeout: float = 10) -> Stream:
    got = await upstream.stream(to.server, "/", b"{}", first_byte_timeout=10, gap_timeout=gap_timeout, request_id="r")
    assert isinstance(got, Stream)
    return got


async def read(got: Stream) -> bytes:
    try:
        read = b""
        while part := await got.next():
            read += part
        return read
    finally:
        got.close()


def ended(got: Stream) -> bool:
    return got._answer.over


async def test_what_a_worker_gets(upstream: Upstream) -> None:
    async with worker(answering(whole(b"1", JSON), whole(b"2")), path="/at") as there:
        first = await upstream.post(there.server, "/v1/x", b'{"a": 1}', 10, request_id="leg-1")
        second = await upstream.get(there.server, "/health", 10)
        assert first == Answer(200, "application/json", b"1")
        assert second == Answer(200, "application/json", b"2"), "what says nothing of its type is taken for JSON"
        host = there.server.url.removeprefix("http://").removesuffix("/at").encode()
        common = b"Host: " + host + b"\r\nUser-Agent: turnback\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        key = b"Authorization: Bearer key\r\n"
        assert there.requests == [
            b"POST /at/v1/x HTTP/1.1\r\n" + common + key
            + b'Content-Type: application/json\r\nContent-Length: 8\r\nX-Request-Id: leg-1\r\n\r\n{"a": 1}',
            b"GET /at/health HTTP/1.1\r\n" + common + key + b"\r\n",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (b"200 OK", Answer(200, "a/b", b"text")),
        (b"299 Odd", Answer(299, "a/b", b"text")),
        (b"302 Found", Failed("status 302", 302)),
        (b"400 Bad Request", Refused(400, "a/b", b"text")),
        (b"429 Too Many Requests", Refused(429, "a/b", b"text")),
        (b"500 Internal Server Error", Failed("status 500", 500)),
        (b"503 Service Unavailable", Failed("status 503", 503)),
    ],
)
async def test_what_an_answers_status_means(status: bytes, result: object, upstream: Upstream) -> None:
    answer = whole(b"text", b"Content-Type: a/b", b"Location: /", status=status)
    async with worker(answering(answer, answer, answer)) as there:
        assert await upstream.post(there.server, "/", b"{}", 10) == result
        assert await upstream.get(there.server, "/", 10) == result
        streamed = await upstream.stream(
            there.server, "/", b"{}", first_byte_timeout=10, gap_timeout=10, request_id="r"
        )
        assert streamed == result
        assert len(there.connections) == 1


@pytest.mark.parametrize("tail", ["a\r\nX-Injected: 1", "a\n", "a\rb", "a\0b", "\u20ac"])
async def test_a_clients_header_that_would_end_its_line_reaches_no_worker(tail: str, upstream: Upstream) -> None:
    async with worker(silent) as there:
        to = forwarding(there.server, {"Authorization": tail})
        for refused in (
            await upstream.post(to, "/", b"{}", 10),
            await upstream.get(to, "/", 10),
            await upstream.stream(to, "/", b"{}", first_byte_timeout=10, gap_timeout=10, request_id="r"),
            await upstream.post(there.server, "/", b"{}", 10, request_id=tail),
        ):
            assert isinstance(refused, Refused)
            assert refused.status == 400
            assert tail.encode() not in refused.body
        assert not there.connections


async def test_a_clients_own_header_goes_before_ours(upstream: Upstream) -> None:
    async with worker(answering(whole(b""))) as there:
        to = forwarding(forwarding(there.server, {"Authorization": "Bearer client"}), {"traceparent": "t"})
        await upstream.post(to, "/", b"{}", 10)
        assert b"Authorization: Bearer client\r\n" in there.requests[0]
        assert b"traceparent: t\r\n" in there.requests[0]
        assert b"Bearer key" not in there.requests[0]


async def test_an_upstream_that_traces_sends_the_same_where_nothing_is_traced() -> None:
    async with TracedUpstream(10, None) as upstream, worker(answering(whole(b""))) as there:
        await upstream.post(forwarding(there.server, {"Authorization": "x"}), "/", b"{}", 10)
        assert b"Authorization: x\r\n" in there.requests[0]


async def test_large_bodies_go_and_come_whole(upstream: Upstream) -> None:
    sent = bytes(range(256)) * 80_000

    async def digests(connection: Connection) -> None:
        for _ in range(2):
            body = (await connection.request()).split(b"\r\n\r\n", 1)[1]
            connection.send(whole(hashlib.sha256(body).hexdigest().encode() + body))
        await connection.until_closed()

    async with worker(digests) as there:
        for _ in range(2):
            got = await upstream.post(there.server, "/", sent, 30)
            assert isinstance(got, Answer)
            assert got.body == hashlib.sha256(sent).hexdigest().encode() + sent
        assert len(there.connections) == 1


async def test_an_answer_before_the_request_was_sent_is_given_and_its_connection_is_not_used_again(
    upstream: Upstream,
) -> None:
    refused = whole(b"too large", status=b"413 Content Too Large")

    async def refuses(connection: Connection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")
        connection.send(refused)
        # Not a byte more is read; the client notices that itself.
        await asyncio.Event().wait()

    async with worker(refuses, answering(whole(b"ok"))) as there:
        got = await upstream.post(there.server, "/", bytes(2**26), 30)
        assert isinstance(got, Refused)
        assert (got.status, got.body) == (413, b"too large")
        assert await upstream.post(there.server, "/", b"{}", 30) == Answer(200, "application/json", b"ok")
        assert len(there.connections) == 2


BREAKS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "closed without an answer"),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-", "closed in the middle"),
    "half a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "closed in the middle"),
    "half a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc", "closed in the middle"),
    "no last chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", "closed in the middle"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP"),
    "an upgrade": (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", "status 101"),
    "a head without end": (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2**20, "too"),
}


@pytest.mark.parametrize(("sent", "said"), BREAKS.values(), ids=BREAKS.keys())
async def test_an_answer_that_breaks_off_is_a_failure(sent: bytes, said: str, upstream: Upstream) -> None:
    async with worker(answering_and_closing(sent)) as there:
        for failed in (
            await upstream.post(there.server, "/", b"{}", 10),
            await upstream.get(there.server, "/", 10),
            await upstream.stream(there.server, "/", b"{}", first_byte_timeout=10, gap_timeout=10, request_id="r"),
        ):
            assert isinstance(failed, Failed)
            assert failed.status is None
            assert failed.sent
            assert failed.detail.startswith("the connection broke: ")
            assert said in failed.detail
        assert len(there.requests) == 3, "nothing is sent twice"


async def test_a_connection_that_is_reset_is_a_failure(upstream: Upstream) -> None:
    """Also an answer that would have ended with its connection: that was no orderly end."""

    async def resets(connection: Connection) -> None:
        await connection.request()
        connection.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await connection.writer.drain()
        connection.reset()

    async with worker(resets) as there:
        failed = await upstream.post(there.server, "/", b"{}", 10)
        assert failed == Failed("the connection broke: lost, ConnectionResetError")


async def test_nobody_listens(upstream: Upstream) -> None:
    async with worker(silent) as gone:
        pass
    failed = await upstream.post(gone.server, "/", b"{}", 10)
    assert failed == Failed("no connection: Connection refused", sent=False)


async def test_a_time_that_is_over_already_sends_nothing(upstream: Upstream) -> None:
    async with worker(silent) as there:
        for seconds in (0, -1):
            failed = await upstream.post(there.server, "/", b"{}", seconds)
            assert isinstance(failed, Failed)
            assert not failed.sent
        assert not there.connections


@dataclass
class Stage:
    """A moment in a request's life."""

    script: Script
    ask: Callable[[Upstream, RenderServer, float], Awaitable[Any]]
    sent: bool = True


async def half(connection: Connection) -> None:
    await connection.request()
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
    await connection.until_closed()


async def never_reads(connection: Connection) -> None:
    await asyncio.Event().wait()


async def _post(upstream: Upstream, to: RenderServer, seconds: float) -> object:
    return await upstream.post(to, "/", b"{}", seconds)


async def _post_much(upstream: Upstream, to: RenderServer, seconds: float) -> object:
    return await upstream.post(to, "/", bytes(2**26), seconds)


async def _get(upstream: Upstream, to: RenderServer, seconds: float) -> object:
    return await upstream.get(to, "/", seconds)


async def _stream(upstream: Upstream, to: RenderServer, seconds: float) -> object:
    return await upstream.stream(to, "/", b"{}", first_byte_timeout=seconds, gap_timeout=seconds, request_id="r")


STAGES = {
    "sending": Stage(never_reads, _post_much),
    "before the head": Stage(silent, _post),
    "before the head of a stream": Stage(silent, _stream),
    "asking": Stage(silent, _get),
    "in the body": Stage(half, _post),
    "in the body of what might have been a stream": Stage(half, _stream),
}


@contextlib.asynccontextmanager
async def at(
    stage: Stage, upstream: Upstream, seconds: float = 10
) -> AsyncIterator[tuple[ScriptedWorker, asyncio.Task[Any]]]:
    """A request that has come so far, on a connection that carried one before."""

    async def script(connection: Connection) -> None:
        await answering_once(connection)
        await stage.script(connection)

    async with worker(script) as there:
        assert isinstance(await upstream.get(there.server, "/first", 10), Answer)
        asking = asyncio.ensure_future(stage.ask(upstream, there.server, seconds))
        if stage.script is not never_reads:
            await eventually(lambda: len(there.requests) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        yield there, asking


async def answering_once(connection: Connection) -> None:
    await connection.request()
    connection.send(whole(b""))


async def gone(there: ScriptedWorker, stage: Stage) -> bool:
    """Whether the worker saw that its client does not want the answer any more."""
    if stage.script is never_reads:
        return there.connections[0].reader.at_eof() or there.connections[0].writer.is_closing()
    return bool(there.over)


AT_ALL_STAGES = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


@AT_ALL_STAGES
async def test_who_is_cancelled_hangs_up(stage: Stage, upstream: Upstream) -> None:
    async with at(stage, upstream) as (there, asking):
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        if stage.script is not never_reads:
            await eventually(lambda: gone(there, stage))
        assert await no_connections(upstream)


@AT_ALL_STAGES
async def test_an_answer_that_takes_too_long_is_a_failure(stage: Stage, upstream: Upstream) -> None:
    async with at(stage, upstream, 0.1) as (_, asking):
        assert await asking == Failed("no answer within 0.1 s, or the worker went down")
        assert await no_connections(upstream)


@AT_ALL_STAGES
async def test_who_waits_for_a_worker_that_went_away_is_told(stage: Stage, upstream: Upstream) -> None:
    async with at(stage, upstream) as (there, asking):
        upstream.stop_waiting(RenderServer("http://another"))
        upstream.give_up_earlier(there.server, 0.0)
        await asyncio.sleep(0)
        assert not asking.done()
        upstream.stop_waiting(there.server)
        upstream.stop_waiting(there.server)
        assert await asking == Failed("no answer within 10 s, or the worker went down")
        assert await no_connections(upstream)


@AT_ALL_STAGES
async def test_who_asked_an_earlier_start_of_a_worker_is_told(stage: Stage, upstream: Upstream) -> None:
    async with at(stage, upstream) as (there, asking):
        upstream.give_up_earlier(there.server, asyncio.get_running_loop().time() + 1)
        assert await asking == Failed("no answer within 10 s, or the worker went down")
        assert await no_connections(upstream)


@AT_ALL_STAGES
async def test_who_waits_when_all_is_closed_is_told(stage: Stage) -> None:
    async with contextlib.AsyncExitStack() as ending:
        leaving = await ending.enter_async_context(contextlib.AsyncExitStack())
        upstream = await leaving.enter_async_context(Upstream(10, None))
        _, asking = await ending.enter_async_context(at(stage, upstream))
        await leaving.aclose()
        assert await asking == Failed("the connection broke: given up")


async def no_connections(upstream: Upstream) -> bool:
    """Wait until none is open."""
    await eventually(lambda: not any(route.connections._open for route in upstream._routes.values()))
    assert not any(route.waits or route.streams for route in upstream._routes.values())
    return True


async def test_a_stream_brings_what_arrives_when_it_arrives(upstream: Upstream) -> None:
    go_on = asyncio.Event()

    async def streams(connection: Connection) -> None:
        await connection.request()
        connection.send(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n"))
        await go_on.wait()
        connection.send(chunk(b"data: 3\n\n") + chunk(b""))
        await connection.until_closed()

    async with worker(streams) as there:
        got = await stream(upstream, there)
        assert got.content_type == "text/event-stream; charset=utf-8"
        assert await got.next() == b"data: 1\n\ndata: 2\n\n", "what arrived together is one part"
        assert not ended(got)
        go_on.set()
        assert await got.next() == b"data: 3\n\n"
        assert ended(got)
        assert await got.next() == b""
        got.close()


async def test_a_streams_connection_is_used_again_when_it_is_over(upstream: Upstream) -> None:
    answer = STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"")
    async with worker(answering(answer, answer, whole(b"ok"))) as there:
        assert await read(await stream(upstream, there)) == b"data: 1\n\n"
        unread = await stream(upstream, there)
        await eventually(lambda: ended(unread))
        assert isinstance(await upstream.get(there.server, "/", 10), Answer)
        unread.close()
        assert await read(unread) == b"data: 1\n\n", "it is another's connection by now, and not closed under it"
        assert len(there.connections) == 1
        assert not there.over


async def test_the_end_of_a_stream_that_was_left_is_read_in_passing(upstream: Upstream) -> None:
    """The connection serves others then, and nobody had to wait for it."""
    go_on = asyncio.Event()

    async def streams(connection: Connection) -> None:
        await connection.request()
        connection.send(STREAM_HEAD + chunk(b"data: [DONE]\n\n"))
        await go_on.wait()
        connection.send(chunk(b""))
        await answering(whole(b"ok"))(connection)

    async with worker(streams) as there:
        got = await stream(upstream, there)
        assert await got.next() == b"data: [DONE]\n\n"
        got.leave()
        assert not ended(got)
        go_on.set()
        await eventually(lambda: ended(got))
        assert isinstance(await upstream.get(there.server, "/", 10), Answer)
        assert len(there.connections) == 1


async def test_a_stream_that_was_left_and_does_not_end_is_closed(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.worker_stream._END_SECONDS", 0.01)

    async with worker(answering(STREAM_HEAD + chunk(b"data: [DONE]\n\n"))) as there:
        got = await stream(upstream, there)
        assert await got.next() == b"data: [DONE]\n\n"
        got.leave()
        await eventually(lambda: there.over)
        assert await no_connections(upstream)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_comes_together_with_the_callers_cancellation_is_not_lost(
    streams: bool, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may name blocks that the worker keeps for whoever asked."""
    got: list[object] = []

    async def ask(to: RenderServer) -> None:
        if streams:
            got.append(await upstream.stream(to, "/", b"{}", first_byte_timeout=9, gap_timeout=9, request_id="r"))
        else:
            got.append(await upstream.post(to, "/", b"{}", 10))
        got.append("not cancelled yet")
        await asyncio.Event().wait()

    async with worker(answering(whole(b"{}", JSON))) as there:
        asking = asyncio.create_task(ask(there.server))
        wake = WorkerConnection.wake

        def wake_and_cancel(connection: WorkerConnection) -> None:
            wake(connection)
            asking.cancel()

        monkeypatch.setattr(WorkerConnection, "wake", wake_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert got == [Answer(200, "application/json", b"{}"), "not cancelled yet"]
        assert asking.cancelling() == 1


async def test_a_stream_that_is_closed_early_makes_the_worker_stop(upstream: Upstream) -> None:
    async with worker(answering(STREAM_HEAD + chunk(b"data: 1\n\n"))) as there:
        got = await stream(upstream, there)
        assert await got.next() == b"data: 1\n\n"
        got.close()
        await eventually(lambda: there.over)
        assert await no_connections(upstream)


async def test_who_is_cancelled_in_a_stream_can_close_it(upstream: Upstream) -> None:
    async with worker(answering(STREAM_HEAD)) as there:
        got = await stream(upstream, there)
        reading = asyncio.ensure_future(read(got))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(lambda: there.over)
        assert await no_connections(upstream)


async def test_a_streams_reader_is_told_that_what_it_asked_is_gone(upstream: Upstream) -> None:
    async with worker(answering(STREAM_HEAD)) as there:
        got = await stream(upstream, there)
        reading = asyncio.ensure_future(read(got))
        upstream.stop_waiting(there.server)
        upstream.give_up_earlier(there.server, got.begun)
        await asyncio.sleep(0.01)
        assert not reading.done()
        upstream.give_up_earlier(there.server, got.begun + 1)
        with pytest.raises(BrokenOff, match="given up"):
            await reading
        await eventually(lambda: there.over)


STREAMED = STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + chunk(b"")


@pytest.mark.parametrize("left_out", range(1, 34, 2))
async def test_a_stream_that_is_cut_short_never_just_ends(left_out: int, upstream: Upstream) -> None:
    async with worker(answering_and_closing(STREAMED[:-left_out])) as there:
        got = await stream(upstream, there)
        with pytest.raises(BrokenOff, match="closed in the middle"):
            await read(got)
        assert not ended(got)


async def test_what_arrived_before_a_break_is_told_before_it(upstream: Upstream) -> None:
    async with worker(answering_and_closing(STREAM_HEAD + chunk(b"data: 1\n\n"))) as there:
        got = await stream(upstream, there)
        await no_connections_but_streams(upstream)
        assert await got.next() == b"data: 1\n\n"
        with pytest.raises(BrokenOff):
            await got.next()
        got.close()


async def no_connections_but_streams(upstream: Upstream) -> None:
    await eventually(lambda: not any(route.connections._open for route in upstream._routes.values()))


async def test_a_stream_that_stalls_breaks_off(upstream: Upstream) -> None:
    async with worker(answering(STREAM_HEAD + chunk(b"data: 1\n\n"))) as there:
        got = await stream(upstream, there, gap_timeout=0.05)
        with pytest.raises(BrokenOff, match=r"nothing for 0\.05 s"):
            await read(got)
        await eventually(lambda: there.over)


class Flood:
    """A worker that sends as much as it is let."""

    def __init__(self, size: int, head: bytes) -> None:
        self.taken = 0
        self._size = size
        self._head = head

    async def __call__(self, connection: Connection) -> None:
        await connection.request()
        connection.send(self._head)
        piece = bytes(2**16)
        while self.taken < self._size:
            connection.send(chunk(piece))
            await connection.writer.drain()
            self.taken += len(piece)
        connection.send(chunk(b""))
        await connection.until_closed()

    async def stands_still(self) -> None:
        """Wait until it is not let any more."""
        before, still = -1, 0
        while still < 5:
            await asyncio.sleep(0.02)
            still = still + 1 if self.taken == before else 0
            before = self.taken


async def test_a_stream_that_nobody_reads_makes_the_worker_wait(upstream: Upstream) -> None:
    flood = Flood(2**26, STREAM_HEAD)
    async with worker(flood) as there:
        got = await stream(upstream, there)
        await flood.stands_still()
        held = flood.taken
        assert held < 2**25, "all but what is in the kernel's buffers"
        assert got._answer.waiting < 2**21
        most = size = 0
        while part := await got.next():
            size += len(part)
            most = max(most, len(part))
        assert size == 2**26
        assert most < 2**21
        got.close()
        assert len(there.connections) == 1


@pytest.mark.parametrize("asked", [_post, _stream])
async def test_a_whole_answer_may_be_of_any_size(
    asked: Callable[[Upstream, RenderServer, float], Awaitable[Any]], upstream: Upstream
) -> None:
    head = STREAM_HEAD.replace(b"text/event-stream", b"application/json")
    async with worker(Flood(2**24, head)) as there:
        got = await asked(upstream, there.server, 30)
        assert isinstance(got, Answer)
        assert len(got.body) == 2**24


async def test_many_at_once_each_get_their_own_answer(upstream: Upstream) -> None:
    async def echoes(connection: Connection) -> None:
        while True:
            connection.send(whole((await connection.request()).split(b"\r\n\r\n", 1)[1]))

    async with worker(echoes) as there:
        for _ in range(2):
            bodies = [b"%d" % number for number in range(300)]
            got = await asyncio.gather(*(upstream.post(there.server, "/", body, 30) for body in bodies))
            assert [answer.body for answer in got if isinstance(answer, Answer)] == bodies
        assert len(there.connections) == 300

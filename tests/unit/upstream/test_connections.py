"""Which connection a request goes on."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohappyeyeballs
import pytest

from proxy import connections
from proxy.servers import RenderServer
from proxy.upstream import Answer, Failed, Upstream
from proxy.worker_connection import WorkerConnection
from tests.running import eventually
from tests.unit.upstream.scripted_worker import (
    STREAM_HEAD,
    Connection,
    ScriptedWorker,
    answering,
    answering_and_closing,
    chunk,
    whole,
    worker,
)

OK = whole(b"ok")


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(10, None) as upstream:
        yield upstream


async def ask(upstream: Upstream, there: ScriptedWorker) -> None:
    assert await upstream.post(there.server, "/", b"{}", 10) == Answer(200, "application/json", b"ok")


async def alone(upstream: Upstream) -> None:
    """Wait until no connection is open."""
    await eventually(lambda: not any(route.connections._open for route in upstream._routes.values()))


async def test_one_request_after_the_other_takes_one_connection(upstream: Upstream) -> None:
    async with worker(answering(*[OK] * 20)) as there:
        for _ in range(20):
            await ask(upstream, there)
        assert len(there.connections) == 1


async def test_the_connection_that_was_used_last_is_used_next(upstream: Upstream) -> None:
    gate = asyncio.Event()

    async def waits(connection: Connection) -> None:
        await connection.request()
        await gate.wait()
        connection.send(OK)
        await connection.request()
        connection.send(whole(b"the first"))
        await connection.until_closed()

    async with worker(waits, answering(OK, OK)) as there:
        slow = asyncio.create_task(ask(upstream, there))
        await eventually(lambda: there.requests)
        await ask(upstream, there)
        gate.set()
        await slow
        got = await upstream.post(there.server, "/", b"{}", 10)
        assert isinstance(got, Answer)
        assert got.body == b"the first"


@pytest.mark.parametrize(
    "answer",
    [
        OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
        OK + b"x",
        OK + OK,
    ],
    ids=["close", "1.0", "too long", "twice"],
)
async def test_a_connection_that_cannot_be_used_again_is_closed(answer: bytes, upstream: Upstream) -> None:
    async with worker(answering(answer)) as there:
        for number in range(3):
            await ask(upstream, there)
            assert len(there.connections) == number + 1
            await eventually(lambda: len(there.over) == len(there.connections))
        await alone(upstream)


async def test_an_answer_that_ends_with_its_connection(upstream: Upstream) -> None:
    async with worker(answering_and_closing(b"HTTP/1.1 200 OK\r\n\r\nok")) as there:
        for _ in range(3):
            await ask(upstream, there)
        assert len(there.connections) == 3
        await alone(upstream)


async def test_a_connection_that_the_worker_closed_is_not_used(upstream: Upstream) -> None:
    async with worker(answering_and_closing(OK)) as there:
        for _ in range(3):
            await ask(upstream, there)
            await alone(upstream)
        assert len(there.connections) == 3


async def test_a_connection_on_which_something_came_that_nobody_asked_for_is_not_used(upstream: Upstream) -> None:
    say_more = asyncio.Event()

    async def says_more(connection: Connection) -> None:
        await connection.request()
        connection.send(OK)
        await say_more.wait()
        connection.send(whole(b"an answer to nothing"))
        await connection.until_closed()

    async with worker(says_more, answering(OK)) as there:
        await ask(upstream, there)
        say_more.set()
        await alone(upstream)
        await ask(upstream, there)
        assert len(there.connections) == 2


async def test_a_connection_that_waited_for_too_long_is_not_used(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(answering(OK, OK)) as there:
        await ask(upstream, there)
        # Before the timer that closes it.
        monkeypatch.setattr(connections, "_KEPT_SECONDS", 0.0)
        await ask(upstream, there)
        assert len(there.connections) == 2


async def test_connections_that_nobody_uses_are_closed(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_KEPT_SECONDS", 0.05)
    async with worker(answering(OK, OK)) as there:
        await asyncio.gather(*(ask(upstream, there) for _ in range(5)))
        await alone(upstream)
        await ask(upstream, there)
        await alone(upstream)
        await eventually(lambda: len(there.over) == len(there.connections))
        (route,) = upstream._routes.values()
        assert not route.connections._idle
        assert route.connections._sweeping is None


async def dies(connection: Connection) -> None:
    await connection.request()
    connection.send(OK)
    # It takes the next request as it goes.
    await connection.request()


async def test_a_request_on_a_kept_connection_that_dies_is_not_sent_again(upstream: Upstream) -> None:
    async with worker(dies, answering(OK)) as there:
        await ask(upstream, there)
        failed = await upstream.post(there.server, "/", b"{}", 10)
        assert failed == Failed("the connection broke: closed without an answer")
        assert failed.sent
        assert len(there.requests) == 2


async def test_what_only_asks_is_asked_again_where_a_kept_connection_dies(upstream: Upstream) -> None:
    async with worker(dies, answering(OK)) as there:
        await ask(upstream, there)
        assert isinstance(await upstream.get(there.server, "/", 10), Answer)
        assert len(there.requests) == 3


async def test_what_began_to_be_answered_is_not_asked_again(upstream: Upstream) -> None:
    async def begins(connection: Connection) -> None:
        await dies(connection)
        connection.send(OK[:20])

    async with worker(begins, answering(OK)) as there:
        await ask(upstream, there)
        assert isinstance(await upstream.get(there.server, "/", 10), Failed)
        assert len(there.requests) == 2


async def test_leaving_closes_all(upstream: Upstream) -> None:
    async with Upstream(10, None) as leaving, worker(answering(OK)) as there:
        await asyncio.gather(*(ask(leaving, there) for _ in range(3)))
        await leaving.__aexit__(None, None, None)
        await eventually(lambda: len(there.over) == 3)
        with pytest.raises(RuntimeError):
            await leaving.post(there.server, "/", b"{}", 10)


async def test_few_connections_are_begun_at_a_time(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, most = 0, 0
    start = aiohappyeyeballs.start_connection

    async def counted(*arguments: Any, **options: Any) -> socket.socket:
        nonlocal begun, most
        begun += 1
        most = max(most, begun)
        try:
            return await start(*arguments, **options)
        finally:
            begun -= 1

    monkeypatch.setattr(aiohappyeyeballs, "start_connection", counted)
    async with worker(answering(OK)) as there:
        await asyncio.gather(*(ask(upstream, there) for _ in range(200)))
        assert len(there.connections) == 200
    assert 1 < most <= 64


async def test_the_next_address_of_a_name_is_tried(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(answering(OK, OK), host="worker.example") as there:
        port = int(there.server.url.rsplit(":", 1)[1])
        (dead,) = socket.getaddrinfo("127.0.0.2", port, type=socket.SOCK_STREAM)
        (good,) = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)

        async def resolved(self: object) -> list[Any]:
            return [dead, good]

        monkeypatch.setattr(connections.Connections, "_resolved", resolved)
        await ask(upstream, there)
        assert b"Host: worker.example:" in there.requests[0]


async def test_a_name(upstream: Upstream) -> None:
    async with worker(answering(OK), host="localhost") as there:
        await ask(upstream, there)


class Certified:
    """A worker's certificate, by which its own authority stands."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "certificate.pem"
        key = folder / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
                *("-keyout", str(key), "-out", str(self.file), "-days", "2", "-subj", "/CN=worker"),
                *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(self.file, key)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_worker_whose_certificate_is_trusted(
    host: str, certified: Certified, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certified.file))
    stream = STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"")
    large = whole(bytes(2**22))
    async with worker(answering(OK, large, stream, OK), tls=certified.context, host=host) as there:
        await ask(upstream, there)
        got = await upstream.post(there.server, "/", bytes(2**22), 10)
        assert isinstance(got, Answer)
        assert len(got.body) == 2**22
        streamed = await upstream.stream(there.server, "/", b"", first_byte_timeout=10, gap_timeout=10, request_id="")
        assert not isinstance(streamed, Answer | Failed)
        await ask(upstream, there)
        assert len(there.connections) == 1


async def test_a_worker_whose_certificate_is_not_trusted_is_told_nothing(
    certified: Certified, upstream: Upstream
) -> None:
    async with worker(answering(OK), tls=certified.context) as there:
        failed = await upstream.post(there.server, "/", b"{}", 10)
        assert isinstance(failed, Failed)
        assert "certificate" in failed.detail
        assert not failed.sent
        assert not there.requests


async def test_a_certificate_for_another_name_is_not_trusted(
    certified: Certified, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certified.file))
    async with worker(answering(OK), tls=certified.context, host="127.0.0.1") as there:
        other = RenderServer(there.server.url.replace("127.0.0.1", "127.0.0.1.nip"))

        async def resolved(self: object) -> list[Any]:
            return list(socket.getaddrinfo("127.0.0.1", int(other.url.rsplit(":", 1)[1]), type=socket.SOCK_STREAM))

        monkeypatch.setattr(connections.Connections, "_resolved", resolved)
        failed = await upstream.post(other, "/", b"{}", 10)
        assert isinstance(failed, Failed)
        assert "mismatch" in failed.detail
        assert not there.requests


async def never_shakes_hands(connection: Connection) -> None:
    await connection.until_closed()


async def test_a_connection_that_is_not_made_in_time(upstream: Upstream) -> None:
    async with worker(never_shakes_hands) as there, Upstream(0.1, None) as hasty:
        secure = RenderServer(there.server.url.replace("http:", "https:"))
        assert await hasty.post(secure, "/", b"{}", 10) == Failed("no connection in time", sent=False)
        await eventually(lambda: there.over)


@pytest.mark.parametrize("how", ["cancelled", "stopped", "late", "left"])
async def test_who_waits_for_a_connection_is_told_and_leaves_none(how: str) -> None:
    async with worker(never_shakes_hands) as there, Upstream(0.5 if how == "left" else 10, None) as upstream:
        secure = RenderServer(there.server.url.replace("http:", "https:"))
        asking = asyncio.create_task(upstream.post(secure, "/", b"{}", 0.1 if how == "late" else 10))
        await eventually(lambda: there.connections)
        match how:
            case "cancelled":
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            case "stopped":
                upstream.stop_waiting(secure)
                upstream.stop_waiting(secure)
                assert await asking == Failed("no answer within 10 s, or the worker went down", sent=False)
            case "late":
                assert await asking == Failed("no answer within 0.1 s, or the worker went down", sent=False)
            case "left":
                await upstream.__aexit__(None, None, None)
                assert await asking == Failed("no connection in time", sent=False)
        await eventually(lambda: there.over)


@pytest.mark.parametrize("secure", [False, True])
async def test_who_is_cancelled_when_a_connection_was_just_made_leaves_none(
    secure: bool, certified: Certified, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop does not tell of such a connection that it is lost: nobody may wait for that."""
    made = WorkerConnection.connection_made

    def made_and_cancelled(connection: WorkerConnection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        asking.cancel()

    monkeypatch.setenv("SSL_CERT_FILE", str(certified.file))
    host, tls = ("localhost", certified.context) if secure else ("127.0.0.1", None)
    async with worker(answering(OK), tls=tls, host=host) as there:
        async with Upstream(10, None) as upstream:
            monkeypatch.setattr(WorkerConnection, "connection_made", made_and_cancelled)
            asking = asyncio.create_task(upstream.post(there.server, "/", b"{}", 10))
            with pytest.raises(asyncio.CancelledError):
                await asking
            monkeypatch.setattr(WorkerConnection, "connection_made", made)
            assert isinstance(await upstream.post(there.server, "/", b"{}", 10), Answer)
        await eventually(lambda: len(there.over) == len(there.connections) == 2)


@pytest.mark.parametrize("host", ["a..b", ".x", "a" * 64])
async def test_a_name_that_cannot_be_one_is_a_failure(host: str, upstream: Upstream) -> None:
    failed = await upstream.post(RenderServer(f"http://{host}:80"), "/", b"{}", 10)
    assert isinstance(failed, Failed)
    assert failed.detail.startswith("no connection: ")
    assert not failed.sent

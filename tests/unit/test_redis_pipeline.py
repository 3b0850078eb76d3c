"""Calls to Redis that share a connection: each gets its own answer, or is told that it gets none."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError

from metadata_store import Absent, LastTurn, NotAsked, Record, StoreError, open_store
from metadata_store.pipeline import NoConnection, Pipeline
from tests.redis_server import RedisServer, Start, follow, opened
from tests.running import eventually
from tests.unit.records import record

KEYS = [f"{number:032x}" for number in range(60)]
SURPLUS = b"$7\r\nsurplus\r\n"


@contextlib.asynccontextmanager
async def pipeline(url: str, timeout: float = 10.0, **settings: Any) -> AsyncIterator[Pipeline]:
    calls = Pipeline(ConnectionPool.from_url(url, protocol=2, **settings), timeout)
    try:
        yield calls
    finally:
        await calls.close()


class Between:
    """Between a store and a Redis server, one connection to the other: what it does to answers can be set."""

    def __init__(self, server: RedisServer) -> None:
        self._port = server.port
        self.links: list[StreamWriter] = []
        self.let_through = asyncio.Event()
        self.let_through.set()
        self.surplus_before: Callable[[bytes], bytes] = lambda asked: b""
        self.surplus_after: Callable[[bytes], bytes] = lambda asked: b""
        """What to add to the answers to what was asked."""
        self.breaks_at: bytes | None = None
        """Asked this, it breaks the connection off."""
        self.refuses: bytes | None = None
        """Asked this, it says that it cannot answer yet."""
        self.reads = asyncio.Event()
        self.reads.set()
        self.url = ""

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.links.append(writer)
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._port)
        asked = b""

        async def back() -> None:
            while data := await from_redis.read(65536):
                await self.let_through.wait()
                writer.write(self.surplus_before(asked) + data + self.surplus_after(asked))

        answers = asyncio.create_task(back())
        try:
            while data := await reader.read(65536):
                await self.reads.wait()
                asked = data
                if self.refuses is not None and asked.endswith(self.refuses):
                    writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
                    continue
                if self.breaks_at is not None and asked.endswith(self.breaks_at):
                    self.breaks_at = None
                    return
                to_redis.write(data)
        except ConnectionResetError:
            return
        finally:
            answers.cancel()
            to_redis.close()
            writer.close()


@pytest.fixture
async def between(redis_server: RedisServer) -> AsyncIterator[Between]:
    one = Between(redis_server)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    yield one
    server.close()
    for link in one.links:
        link.close()


Run = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """In this loop, or in one as the router has."""

    async def in_uvloop(work: Coroutine[Any, Any, None]) -> None:
        await asyncio.to_thread(uvloop.run, work)

    async def here(work: Coroutine[Any, Any, None]) -> None:
        await work

    return here if request.param == "asyncio" else in_uvloop


async def test_calls_at_once_share_one_connection_and_each_gets_its_own_answer(between: Between) -> None:
    put = {key: record(time.time() + 300, number + 1) for number, key in enumerate(KEYS)}
    async with opened(between.url) as store:
        await asyncio.gather(*(store.put(key, one) for key, one in put.items()))
        taken = await asyncio.gather(*(store.take(key) for key in reversed(KEYS)))
        assert taken == [put[key] for key in reversed(KEYS)]
    assert len(between.links) == 1


async def test_calls_that_were_given_up_leave_the_answers_of_the_others_where_they_belong(between: Between) -> None:
    async with opened(between.url) as store:
        for number, key in enumerate(KEYS):
            await store.put(key, record(time.time() + 300, number + 1))
        between.let_through.clear()
        takes = [asyncio.create_task(store.take(key)) for key in KEYS]
        await asyncio.sleep(0)
        for given_up in takes[::3]:
            given_up.cancel()
        between.let_through.set()
        found = await asyncio.gather(*takes, return_exceptions=True)
        for number, one in enumerate(found):
            if number % 3 == 0:
                assert isinstance(one, asyncio.CancelledError)
            else:
                assert isinstance(one, Record)
                assert one.turn == number + 1
        assert await store.take("f" * 32) is Absent.NOTHING
    assert len(between.links) == 1


async def test_call_that_is_late_ends_the_connection_for_new_calls_but_not_for_those_on_the_way(
    between: Between,
) -> None:
    async with pipeline(between.url) as calls:
        await calls.ask("PING")
        between.let_through.clear()
        calls._timeout = 0.1
        late = asyncio.create_task(calls.ask("ECHO", "late"))
        await asyncio.sleep(0)
        calls._timeout = 20.0
        on_the_way = asyncio.create_task(calls.ask("ECHO", "on the way"))
        with pytest.raises(TimeoutError):
            await late
        assert not on_the_way.done()
        between.let_through.set()
        assert await on_the_way == b"on the way"
        assert len(between.links) == 1
        assert await calls.ask("ECHO", "new") == b"new"
        assert len(between.links) == 2
        # The one before has no more to wait for.
        await eventually(between.links[0].is_closing)


async def test_call_is_late_at_its_own_time_whatever_time_those_before_it_have(between: Between) -> None:
    async with pipeline(between.url) as calls:
        await calls.ask("PING")
        between.let_through.clear()
        calls._timeout = 600.0
        patient = asyncio.create_task(calls.ask("ECHO", "patient"))
        await asyncio.sleep(0)
        calls._timeout = 0.1
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            await calls.ask("ECHO", "late")
        # Connecting had ten seconds.
        assert time.monotonic() - begun < 5.0
        assert not patient.done()
        await calls.close()
        with pytest.raises(RedisError):
            await patient


async def test_answer_that_nobody_asked_for_is_never_taken_for_one(between: Between) -> None:
    put = record(time.time() + 300)
    async with opened(between.url) as store:
        await store.put(KEYS[0], put)
        between.surplus_after = lambda asked: SURPLUS
        with contextlib.suppress(StoreError):
            assert await store.take(KEYS[1]) is Absent.NOTHING
        between.surplus_after = lambda asked: b""
        assert await store.take(KEYS[0]) == put
    assert len(between.links) == 2


@pytest.mark.parametrize(
    "url",
    ["redis://host/0", "rediss://host", "unix:///socket", "redis+sentinel://host/service", "redis+cluster://host"],
)
def test_url_that_asks_for_another_protocol_is_refused(url: str) -> None:
    open_store(f"{url}?protocol=2", 1.0)
    with pytest.raises(ValueError, match="protocol"):
        open_store(f"{url}?protocol=3", 1.0)


async def test_what_the_server_tells_unasked_is_never_taken_for_an_answer(between: Between) -> None:
    notice = b">4\r\n$6\r\nMOVING\r\n:1\r\n:15\r\n$9\r\nhost:6379\r\n"
    async with pipeline(between.url) as calls:
        await calls.ask("PING")
        between.surplus_before = lambda asked: notice if b"ECHO" in asked else b""
        told = await asyncio.gather(*(calls.ask("ECHO", word) for word in "abc"), return_exceptions=True)
        assert all(isinstance(one, RedisError) and not isinstance(one, NoConnection) for one in told)
        between.surplus_before = lambda asked: b""
        assert await calls.ask("ECHO", "d") == b"d"
    assert len(between.links) == 2


async def test_answers_that_have_moved_on_by_one_are_not_believed(between: Between) -> None:
    stray = [b"*4\r\n$1\r\n1\r\n$6\r\nabcdef\r\n$-1\r\n$-1\r\n"]
    async with opened(between.url) as store:
        for number, key in enumerate(KEYS):
            await store.put(key, record(time.time() + 300, number + 1))
        between.surplus_before = lambda asked: stray.pop() if stray else b""
        for one in await asyncio.gather(*(store.take(key) for key in KEYS[:9]), return_exceptions=True):
            assert isinstance(one, StoreError)
            # All of them may have been done.
            assert not isinstance(one, NotAsked)
        assert not stray
        last = await store.take(KEYS[9])
        assert isinstance(last, Record)
        assert last.turn == 10
    assert len(between.links) == 2


async def test_master_that_was_demoted_is_asked_nothing_more_after_a_turn_was_to_be_noted(start_redis: Start) -> None:
    master, other = start_redis(), start_redis()
    one = Between(master)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    try:
        async with opened(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0") as store:
            last = LastTurn.of(record(time.time() + 300))
            assert await store.note_turn(KEYS[0], last) is None
            assert await store.note_turn(KEYS[0], last) == last
            await asyncio.to_thread(follow, master, other)
            with pytest.raises(StoreError):
                await store.note_turn(KEYS[0], last)
            await eventually(one.links[0].is_closing)
    finally:
        server.close()


async def test_connection_whose_answers_are_not_to_what_was_asked_is_not_used(between: Between) -> None:
    # Left over from what redis-py asked when it connected.
    between.surplus_before = lambda asked: SURPLUS if b"return ARGV[1]" in asked else b""
    async with opened(between.url) as store:
        for call in (store.take(KEYS[0]), store.put(KEYS[0], record(time.time() + 300))):
            with pytest.raises(NotAsked):
                await call
        between.surplus_before = lambda asked: b""
        assert await store.take(KEYS[0]) is Absent.NOTHING


async def test_calls_on_a_connection_that_breaks_may_have_been_done_and_the_next_has_another(
    between: Between,
) -> None:
    async with opened(between.url) as store:
        await store.take(KEYS[0])
        between.let_through.clear()
        puts = [asyncio.create_task(store.put(key, record(time.time() + 300))) for key in KEYS]
        await asyncio.sleep(0)
        between.links[0].close()
        for one in await asyncio.gather(*puts, return_exceptions=True):
            assert isinstance(one, StoreError)
            assert not isinstance(one, NotAsked)
        between.let_through.set()
        assert await store.take("f" * 32) is Absent.NOTHING
    assert len(between.links) == 2


async def test_server_that_never_answers_costs_all_who_wait_for_a_connection_one_time_out_and_they_know(
    between: Between,
) -> None:
    between.let_through.clear()
    async with opened(between.url, timeout=0.5) as store:
        begun = time.monotonic()
        found = await asyncio.gather(*(store.take(key) for key in KEYS), return_exceptions=True)
        assert time.monotonic() - begun < 5.0
        assert all(isinstance(one, NotAsked) for one in found)
        between.let_through.set()

        async def answers() -> bool:
            with contextlib.suppress(StoreError):
                return await store.take(KEYS[0]) is Absent.NOTHING
            return False

        await eventually(answers)


async def test_who_gives_up_waiting_for_a_connection_does_not_take_it_from_the_others(between: Between) -> None:
    between.let_through.clear()
    async with opened(between.url) as store:
        first, second = (asyncio.create_task(store.take(key)) for key in KEYS[:2])
        await eventually(lambda: bool(between.links))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        between.let_through.set()
        assert await second is Absent.NOTHING
    assert len(between.links) == 1


class Doubted(Connection):
    """One that is not trusted for longer than no time."""

    async def connect(self) -> None:
        await super().connect()  # type: ignore[no-untyped-call]
        self.health_check_interval = 1e-9


async def test_connection_that_has_rested_is_tried_and_replaced_without_losing_the_call(between: Between) -> None:
    async with pipeline(between.url, connection_class=Doubted) as calls:
        assert await calls.ask("ECHO", "one") == b"one"
        assert await calls.ask("ECHO", "two") == b"two"
        assert len(between.links) == 1
        # Forgotten by what is between, which is told only when something is sent.
        between.breaks_at = b"PING\r\n"
        assert await calls.ask("ECHO", "three") == b"three"
        assert len(between.links) == 2


async def test_connection_that_cannot_be_used_after_a_rest_does_not_stay_open(between: Between) -> None:
    async with pipeline(between.url, connection_class=Doubted) as calls:
        assert await calls.ask("ECHO", "one") == b"one"
        between.refuses = b"PING\r\n"
        assert await calls.ask("ECHO", "two") == b"two"
        assert len(between.links) == 2
        await eventually(between.links[0].is_closing)


async def test_closing_does_not_wait_for_a_server_that_does_not_read(between: Between, run: Run) -> None:
    async def close() -> None:
        async with pipeline(between.url, timeout=600.0) as calls:
            await calls.ask("PING")
            between.reads.clear()
            asked = asyncio.create_task(calls.ask("ECHO", b"x" * 32_000_000))
            await asyncio.sleep(0)
            begun = time.monotonic()
            await calls.close()
            assert time.monotonic() - begun < 30.0
            with pytest.raises(RedisError):
                await asked

    await run(close())


async def test_who_waits_for_a_connection_when_the_store_is_closed_is_told_that_there_is_none(between: Between) -> None:
    between.let_through.clear()
    async with opened(between.url) as store:
        for begun in (lambda: True, lambda: bool(between.links)):
            waits = asyncio.create_task(store.take(KEYS[0]))
            await asyncio.sleep(0)
            await eventually(begun)
            await store.close()
            with pytest.raises(NotAsked):
                await waits


async def test_server_that_does_not_read_is_not_sent_ever_more(between: Between, run: Run) -> None:
    async def send() -> None:
        much = b"x" * 16_000_000
        async with pipeline(between.url, timeout=600.0) as calls:
            await calls.ask("PING")
            between.reads.clear()
            asked: list[asyncio.Task[Any]] = []
            for _ in range(12):
                asked.append(asyncio.create_task(calls.ask("EVAL", "return #ARGV[1]", 0, much)))
                await asyncio.sleep(0)
            refused = [one for one in asked if one.done()]
            assert 2 <= len(refused) <= 8
            for one in refused:
                assert isinstance(one.exception(), NoConnection)
            here.call_soon_threadsafe(between.reads.set)
            sent = [one for one in asked if one not in refused]
            assert await asyncio.gather(*sent) == [len(much)] * len(sent)
            assert await calls.ask("ECHO", "again") == b"again"

    here = asyncio.get_running_loop()
    await run(send())


async def test_call_after_the_pipeline_was_closed_mid_way_is_not_left_hanging(between: Between) -> None:
    async with pipeline(between.url) as calls:
        await calls.ask("ECHO", "one")
        between.let_through.clear()
        asked = asyncio.create_task(calls.ask("ECHO", "two"))
        await asyncio.sleep(0)
        await calls.close()
        with pytest.raises(RedisError):
            await asked


async def test_error_of_one_call_is_told_to_that_call_alone(redis_server: RedisServer) -> None:
    async with pipeline(redis_server.url) as calls:
        told = await asyncio.gather(
            *(calls.ask("ECHO", "one"), calls.ask("NO SUCH COMMAND"), calls.ask("ECHO", "two")),
            return_exceptions=True,
        )
    assert (told[0], told[2]) == (b"one", b"two")
    assert isinstance(told[1], ResponseError)


async def test_server_that_is_down_is_told_as_no_connection(redis_server: RedisServer) -> None:
    async with pipeline(redis_server.url) as calls:
        await calls.ask("PING")
        redis_server.stop()

        async def fails() -> bool:
            try:
                await calls.ask("PING")
            except NoConnection:
                return True
            except RedisError:
                return False
            raise AssertionError("a server that was stopped answered")

        await eventually(fails)


async def works(url: str) -> None:
    put = {key: record(time.time() + 300, number + 1) for number, key in enumerate(KEYS)}
    async with opened(url) as store:
        await asyncio.gather(*(store.put(key, one) for key, one in put.items()))
        assert await asyncio.gather(*(store.take(key) for key in KEYS)) == list(put.values())


async def test_tcp_works(redis_server: RedisServer, run: Run) -> None:
    await run(works(redis_server.url))


async def test_unix_socket_works(start_redis: Start, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "redis.sock"
    start_redis("--unixsocket", str(path))
    await run(works(f"unix://{path}?db=2"))


async def test_tls_works(between: Between, tmp_path: Path, run: Run) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = [*new.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    server = await asyncio.start_server(between.serve, "127.0.0.1", 0, ssl=tls)
    try:
        port = server.sockets[0].getsockname()[1]
        await run(works(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"))
    finally:
        server.close()
    assert len(between.links) == 1


async def test_password_database_and_name_of_the_url_are_used(start_redis: Start) -> None:
    server = start_redis()
    server.command("ACL", "SETUSER", "router", "on", ">secret", "~*", "+@all")
    url = f"redis://router:secret@127.0.0.1:{server.port}/3?client_name=turnback"
    async with opened(url) as store, Redis.from_url(server.url) as redis:
        await store.take(KEYS[0])
        told = [one for one in await redis.client_list() if one["name"] == "turnback"]
        assert [(one["user"], one["db"]) for one in told] == [("router", "3")]

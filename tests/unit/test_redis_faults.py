"""Redis that is down, hangs, comes back, or holds what no one can read: a ``StoreError`` in time, and no worse."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from deploy.local.ports import free_port
from metadata_store import Absent, NotAsked, Store, StoreError, open_store
from metadata_store.keys import conversation_key, derive_secret
from metadata_store.record import Holding, encode
from metadata_store.redis import RedisStore
from tests.redis_server import RedisServer, opened
from tests.running import eventually
from tests.unit.records import record

KEY = "a" * 32
LIMIT = 0.5
"""Seconds that a call may take; far more than a Redis on this machine needs."""
SLACK = 5.0
"""How much later than that is still in time on a busy machine, and far from what retries would take."""


def calls(store: Store) -> list[Callable[[], Awaitable[object]]]:
    later = record(time.time() + 300)

    async def scan() -> list[object]:
        return [found async for found in store.scan()]

    return [
        lambda: store.take(KEY),
        lambda: store.put(KEY, later),
        lambda: store.restore(KEY, later),
        lambda: store.discard(KEY),
        scan,
    ]


async def fails_in_time(call: Callable[[], Awaitable[object]]) -> str:
    begun = time.monotonic()
    with pytest.raises(StoreError) as raised:
        await call()
    assert time.monotonic() - begun < LIMIT + SLACK
    return str(raised.value)


@contextlib.asynccontextmanager
async def listening(serve: Callable[[StreamReader, StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that does what ``serve`` says with each connection; its Redis URL."""
    running: set[asyncio.Task[None]] = set()

    async def on_connection(reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_redis_that_is_down_is_a_store_error_in_time() -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}/0", LIMIT) as store:
        for call in calls(store):
            await fails_in_time(call)


async def test_redis_that_accepts_and_never_answers_is_a_store_error_in_time() -> None:
    async def silent(reader: StreamReader, writer: StreamWriter) -> None:
        while await reader.read(1000):
            pass

    async with listening(silent) as url, opened(url, LIMIT) as store:
        for call in calls(store):
            await fails_in_time(call)


async def test_redis_that_answers_no_redis_is_a_store_error() -> None:
    async def wrong(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with listening(wrong) as url, opened(url, LIMIT) as store:
        for call in calls(store):
            await fails_in_time(call)


async def test_redis_that_comes_back_is_used_again_by_the_same_store(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store:
        await store.put(KEY, record(time.time() + 300))
        redis_server.stop()
        for call in calls(store):
            with pytest.raises(StoreError):
                await call()
        redis_server.start()
        assert await store.take(KEY) is Absent.NOTHING
        put = record(time.time() + 300)
        await store.put(KEY, put)
        assert await store.take(KEY) == put


class Between:
    """Between a store and a Redis server: passes everything on, or holds the answers back, or breaks off."""

    def __init__(self, server: RedisServer) -> None:
        self._port = server.port
        self.asked: list[bytes] = []
        self.let_through = asyncio.Event()
        self.let_through.set()
        self.break_off = False

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._port)

        async def back() -> None:
            while data := await from_redis.read(65536):
                if self.break_off:
                    writer.close()
                    return
                await self.let_through.wait()
                writer.write(data)

        answers = asyncio.create_task(back())
        try:
            while data := await reader.read(65536):
                self.asked.append(data)
                to_redis.write(data)
        finally:
            answers.cancel()
            to_redis.close()

    def count(self, command: bytes) -> int:
        return b"".join(self.asked).count(b"\r\n" + command + b"\r\n")


async def test_put_whose_answer_was_lost_is_not_sent_again(redis_server: RedisServer) -> None:
    """A second one would displace the first, and the caller release the blocks it has just stored."""
    between = Between(redis_server)
    async with listening(between.serve) as url, opened(url, timeout=10.0) as store:
        await store.take(KEY)
        before = between.count(b"EVAL")
        between.break_off = True
        with pytest.raises(StoreError):
            await store.put(KEY, record(time.time() + 300))
        assert between.count(b"EVAL") == before + 1
    async with opened(redis_server.url, timeout=10.0) as store:
        assert await store.take(KEY) != Absent.NOTHING


async def test_answer_that_was_lost_is_told_apart_from_a_call_that_was_never_sent(redis_server: RedisServer) -> None:
    """After the first, another turn may have the entry; after the second, nobody."""
    between = Between(redis_server)
    later = record(time.time() + 300)
    async with listening(between.serve) as url, opened(url, timeout=10.0) as store:
        await store.take(KEY)
        between.break_off = True
        for call in (store.put, store.restore):
            with pytest.raises(StoreError) as lost:
                await call(KEY, later)
            assert not isinstance(lost.value, NotAsked)
            between.break_off = False
            await store.take(KEY)
            between.break_off = True


async def test_call_for_which_there_is_no_connection_was_surely_not_done(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store:
        await store.take(KEY)
        await stopped(redis_server)
        for call in calls(store)[:4]:
            with pytest.raises(NotAsked, match="connecting to"):
                await call()


async def test_connection_that_idled_over_a_restart_costs_no_call(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store:
        await store.take(KEY)
        await stopped(redis_server)
        redis_server.start()
        put = record(time.time() + 300)
        await store.put(KEY, put)
        assert await store.take(KEY) == put


async def stopped(server: RedisServer) -> None:
    """Returns when this process has seen that its connections are closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    server.stop()
    # A server that is killed may reset what it had open rather than close it.
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_call_for_which_no_sentinel_names_a_server_was_surely_not_done() -> None:
    async with opened(f"redis+sentinel://127.0.0.1:{free_port()}/service", timeout=10.0) as store:
        for call in calls(store)[:4]:
            with pytest.raises(NotAsked, match="No master found"):
                await call()


@pytest.mark.parametrize("options", ["", "?retry_on_timeout=true"])
def test_no_command_is_ever_sent_twice(options: str) -> None:
    """Whatever redis-py's defaults become: its own are ten retries with pauses, far beyond any time-out."""
    store = open_store("redis://127.0.0.1:1/0" + options, 1.0)
    assert isinstance(store, RedisStore)
    assert isinstance(store._redis, Redis)
    pool = store._redis.connection_pool
    assert pool.connection_class(**pool.connection_kwargs).retry.get_retries() == 0


async def test_answer_that_came_too_late_is_never_taken_for_that_of_the_next_call(redis_server: RedisServer) -> None:
    between = Between(redis_server)
    async with listening(between.serve) as url, opened(url, LIMIT) as store, opened(redis_server.url, 10.0) as direct:
        await direct.put(KEY, record(time.time() + 300, turn=1))
        await direct.put("b" * 32, record(time.time() + 300, turn=2))
        await store.take("c" * 32)
        between.let_through.clear()
        with pytest.raises(StoreError):
            await store.take(KEY)
        between.let_through.set()
        taken = await store.take("b" * 32)
        assert not isinstance(taken, Absent)
        assert taken.turn == 2


async def test_turn_that_was_cancelled_leaves_no_answer_for_the_next(redis_server: RedisServer) -> None:
    between = Between(redis_server)
    async with listening(between.serve) as url, opened(url, timeout=20.0) as store:
        await store.put(KEY, record(time.time() + 300, turn=1))
        await store.put("b" * 32, record(time.time() + 300, turn=2))
        between.let_through.clear()
        before = between.count(b"EVAL")
        turn = asyncio.create_task(store.take(KEY))
        await eventually(lambda: between.count(b"EVAL") > before)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        between.let_through.set()
        taken = await store.take("b" * 32)
        assert not isinstance(taken, Absent)
        assert taken.turn == 2


async def raw(server: RedisServer) -> dict[bytes, bytes]:
    """Every key there is, and its value."""
    async with Redis.from_url(server.url) as redis:
        found: dict[bytes, bytes] = {}
        for key in await redis.keys("*"):
            value = await redis.get(key)
            assert isinstance(key, bytes)
            if value is not None:  # else it has expired since
                assert isinstance(value, bytes)
                found[key] = value
        return found


async def test_redis_drops_an_entry_by_itself_at_its_deadline(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store:
        await store.put(KEY, record(time.time() + 0.3))
        assert len(await raw(redis_server)) == 3

        async def entry_is_gone() -> bool:
            return not any(key.endswith(b":entry") for key in await raw(redis_server))

        await eventually(entry_is_gone)
        assert len(await raw(redis_server)) == 2
        assert await store.take(KEY) is Absent.EXPIRED
        assert [key[-5:] for key in await raw(redis_server)] == [b":last"]


async def test_no_key_stays_in_redis_for_ever(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store:
        await store.put(KEY, record(time.time() + 300))
        await store.restore("b" * 32, record(time.time() + 300))
        async with Redis.from_url(redis_server.url) as redis:
            lives = [await redis.pttl(key) for key in await redis.keys("*")]
    assert len(lives) == 5
    assert all(0 < life <= (300 + 3600) * 1000 for life in lives)


async def test_nothing_of_caller_or_conversation_is_in_the_clear_in_redis(redis_server: RedisServer) -> None:
    secret = derive_secret("the-secret")
    keys = [
        conversation_key(secret, caller, model, "conversation-of-alice")
        for caller in ("Bearer sk-alice", "Bearer sk-bob")
        for model in ("model-a", "model-b")
    ]
    async with opened(redis_server.url, timeout=10.0) as store:
        for key in keys:
            await store.put(key, record(time.time() + 300))
        found = await raw(redis_server)
        assert len(found) == 12
        everything = b"\n".join([*found.keys(), *(value for value in found.values())])
        for private in (b"alice", b"bob", b"sk-", b"conversation-of", b"the-secret", secret):
            assert private not in everything
        assert not any(model in key for key in found for model in (b"model-a", b"model-b"))


def _entry_key(key: str) -> str:
    return f"turnback:{{{key}}}:entry"


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"nonsense", b"\xff" * 40, encode(record(9.0))),
        *(b"LIFE ", b"LIFE " + encode(record(9.0))[:-3], b"LIFE \x92\x01" + encode(record(9.0))[2:]),
    ],
    ids=["empty", "text", "bytes", "of no life", "only a life", "cut off", "other version"],
)
async def test_value_that_no_one_can_read_fails_one_call_and_no_more(redis_server: RedisServer, value: bytes) -> None:
    good = record(time.time() + 300)
    async with opened(redis_server.url, timeout=10.0) as store, Redis.from_url(redis_server.url) as redis:
        await store.put("b" * 32, good)
        life, _, _ = (await raw(redis_server))[_entry_key("b" * 32).encode()].partition(b" ")
        value = value.replace(b"LIFE", life)

        await redis.set(_entry_key(KEY), value, px=100_000)
        assert [found async for _, found in store.scan()] == [Holding.of(good)]
        with pytest.raises(StoreError):
            await store.take(KEY)
        assert await store.take(KEY) is Absent.NOTHING

        await redis.set(_entry_key(KEY), value, px=100_000)
        with pytest.raises(StoreError):
            await store.put(KEY, good)
        assert await store.take(KEY) == good

        await redis.set(_entry_key(KEY), value, px=100_000)
        assert await store.restore(KEY, good) is False
        with pytest.raises(StoreError):
            await store.discard(KEY)
        assert await store.discard(KEY) is None

        assert await store.take("b" * 32) == good


async def test_key_of_another_type_is_a_store_error(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store, Redis.from_url(redis_server.url) as redis:
        await redis.rpush(_entry_key(KEY), "x")
        with pytest.raises(StoreError):
            await store.take(KEY)
        with pytest.raises(StoreError):
            await store.put(KEY, record(time.time() + 300))


async def test_unreadable_note_of_a_deadline_is_a_store_error(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store, Redis.from_url(redis_server.url) as redis:
        await redis.set(f"turnback:{{{KEY}}}:note", "soon")
        with pytest.raises(StoreError):
            await store.take(KEY)
        assert await store.take(KEY) is Absent.NOTHING


async def test_error_does_not_quote_the_entry(redis_server: RedisServer) -> None:
    """redis-py puts the whole command into its message, and that goes to the log."""
    async with opened(redis_server.url, timeout=10.0) as store, Redis.from_url(redis_server.url) as redis:
        await redis.rpush(_entry_key(KEY), "x")
        with pytest.raises(StoreError) as raised:
            await store.put(KEY, record(time.time() + 300, params=b"p" * 5000))
        assert len(str(raised.value)) < 300


async def test_other_keys_in_the_same_redis_are_left_alone(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, timeout=10.0) as store, Redis.from_url(redis_server.url) as redis:
        await redis.set("somebody:else", "1")
        await store.put(KEY, record(time.time() + 300))
        assert [key async for key, _ in store.scan()] == [KEY]
        await store.discard(KEY)
        assert await raw(redis_server) == {b"somebody:else": b"1"}

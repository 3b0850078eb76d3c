"""Redis that falls back to an older state: what was taken must not come back, whatever brought it back there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from metadata_store import Absent, Holding, Record, Store, StoreError, open_store
from tests.redis_server import RedisServer, Start, follow
from tests.running import eventually
from tests.unit.records import record

KEY = "a" * 32
OTHER = "b" * 32


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url, 10.0)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def later(turn: int = 1) -> Record:
    return record(time.time() + 300, turn)


async def keys(server: RedisServer) -> int:
    async with Redis.from_url(server.url) as redis:
        return int(await redis.dbsize())


async def knows_nothing_but_goes_on(store: Store) -> None:
    """Of ``KEY``, by whatever call; and new entries are kept as ever."""
    assert [found async for found in store.scan()] == []
    assert await store.take(KEY) is Absent.NOTHING
    put = later(7)
    assert (await store.put(KEY, put)).displaced is None
    assert [found async for found in store.scan()] == [(KEY, Holding.of(put))]
    assert await store.take(KEY) == put


@pytest.mark.parametrize("log", ["no", "yes"], ids=["snapshot", "append-only file"])
async def test_taken_entry_does_not_come_back_after_a_crash(start_redis: Start, log: str) -> None:
    server = start_redis("--appendonly", log, persistent=True)
    async with opened(server.url) as store:
        await store.put(KEY, later())
        if log == "no":
            server.command("SAVE")
        else:
            # What the last second was: written down, but the removal not yet.
            server.command("CONFIG", "SET", "appendfsync", "always")
            await store.put(KEY, later())
            server.command("CONFIG", "SET", "appendonly", "no")
        assert isinstance(await store.take(KEY), Record)
        server.stop()
        server.start()
        assert await keys(server) == 3
        with contextlib.suppress(StoreError):
            await store.take(OTHER)
        await knows_nothing_but_goes_on(store)


async def test_entry_of_another_life_is_neither_displaced_nor_discarded(start_redis: Start) -> None:
    """Either would release blocks that may be somebody else's by now."""
    server = start_redis(persistent=True)
    async with opened(server.url) as store:
        for key in (KEY, OTHER):
            await store.put(key, later())
        server.command("SAVE")
        server.stop()
        server.start()
        assert await keys(server) == 6
        with contextlib.suppress(StoreError):
            await store.take("c" * 32)
        assert (await store.put(KEY, later(2))).displaced is None
        assert await store.discard(OTHER) is None
        assert await keys(server) == 3


async def test_entry_of_another_life_does_not_keep_one_from_going_back(start_redis: Start) -> None:
    server = start_redis(persistent=True)
    async with opened(server.url) as store:
        await store.put(KEY, later())
        server.command("SAVE")
        taken = await store.take(KEY)
        assert isinstance(taken, Record)
        server.stop()
        server.start()
        with contextlib.suppress(StoreError):
            await store.take(OTHER)
        assert await store.restore(KEY, taken) is True
        assert await store.restore(KEY, taken) is False
        assert await store.take(KEY) == taken


async def test_entry_of_another_life_does_not_count_as_expired(start_redis: Start) -> None:
    server = start_redis(persistent=True)
    async with opened(server.url) as store:
        put = record(time.time() + 0.5)
        await store.put(KEY, put)
        server.command("SAVE")
        server.stop()
        server.start()
        await eventually(lambda: time.time() > put.deadline + 0.01)
        with contextlib.suppress(StoreError):
            await store.take(OTHER)
        assert await store.take(KEY) is Absent.NOTHING


async def test_replica_that_missed_the_removal_does_not_give_the_entry_when_promoted(start_redis: Start) -> None:
    master, replica = start_redis(), start_redis()
    follow(replica, master)
    async with opened(master.url) as store, opened(replica.url) as promoted:
        await store.put(KEY, later())

        async def copied() -> bool:
            return await keys(replica) == 3

        await eventually(copied)
        replica.command("REPLICAOF", "NO", "ONE")
        # Both are masters now, as in a fail-over: each entry is one's or the other's.
        assert [found async for found in promoted.scan()] == []
        assert await promoted.take(KEY) is Absent.NOTHING
        assert isinstance(await store.take(KEY), Record)
        await knows_nothing_but_goes_on(promoted)


async def test_master_that_was_demoted_and_promoted_again_does_not_give_it_either(start_redis: Start) -> None:
    """Same process, same connection: only the history of its data tells."""
    first, second = start_redis("--repl-diskless-sync", "no"), start_redis()
    follow(second, first)
    async with opened(first.url) as store:
        await store.put(KEY, later())

        async def copied() -> bool:
            return await keys(second) == 3

        await eventually(copied)
        second.command("REPLICAOF", "NO", "ONE")
        async with Redis.from_url(first.url) as redis:
            process = (await redis.info("server"))["run_id"]
            assert isinstance(await store.take(KEY), Record)
            follow(first, second)
            first.command("REPLICAOF", "NO", "ONE")
            assert (await redis.info("server"))["run_id"] == process
        assert await keys(first) == 3
        await knows_nothing_but_goes_on(store)


@pytest.mark.parametrize("read_only", ["yes", "no"])
async def test_replica_gives_nothing(start_redis: Start, read_only: str) -> None:
    master, replica = start_redis(), start_redis("--replica-read-only", read_only)
    follow(replica, master)
    async with opened(master.url) as store, opened(replica.url) as other:
        await store.put(KEY, later())
        for call in (other.take, other.discard):
            with pytest.raises(StoreError, match="replica"):
                await call(KEY)
        for put in (other.put, other.restore):
            with pytest.raises(StoreError, match="replica"):
                await put(KEY, later())
        with pytest.raises(StoreError, match="replica"):
            assert [found async for found in other.scan()]
        assert isinstance(await store.take(KEY), Record)


async def test_connection_to_a_master_that_was_demoted_is_not_kept(start_redis: Start) -> None:
    """Behind the same name there may be another server by now."""
    master, other = start_redis(), start_redis()
    async with opened(master.url) as store, Redis.from_url(master.url) as redis:
        await store.take(KEY)
        master.command("REPLICAOF", "127.0.0.1", str(other.port))
        with pytest.raises(StoreError, match="replica"):
            await store.take(KEY)

        async def alone() -> bool:
            return len(await redis.client_list(_type="normal")) == 1

        await eventually(alone)


@pytest.mark.parametrize("forbidden", ["-info", "-eval", "-getdel"])
async def test_user_who_may_not_do_what_is_needed_is_told_what_to_allow(start_redis: Start, forbidden: str) -> None:
    server = start_redis()
    server.command("ACL", "SETUSER", "router", "on", ">secret", "~*", "+@all", forbidden)
    async with opened(f"redis://router:secret@127.0.0.1:{server.port}/0") as store:
        with pytest.raises(StoreError, match=r"must be allowed .*\+eval \+info") as raised:
            await store.take(KEY)
        assert forbidden != "-info" or "INFO is not allowed" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400


async def test_rights_that_are_told_are_enough(start_redis: Start) -> None:
    server = start_redis()
    rights = ("~turnback:*", "+eval", "+info", "+get", "+set", "+getdel", "+scan", "+ping", "+select")
    server.command("ACL", "SETUSER", "router", "on", ">secret", *rights)
    async with opened(f"redis://router:secret@127.0.0.1:{server.port}/1?health_check_interval=1") as store:
        await store.put(KEY, later())
        taken = await store.take(KEY)
        assert isinstance(taken, Record)
        assert await store.restore(KEY, taken)
        assert [key async for key, _ in store.scan()] == [KEY]
        # A connection that has rested is tried before it is used.
        before = await pings(server)
        await asyncio.sleep(1.1)
        assert await store.discard(KEY) == taken
        assert await pings(server) > before


async def pings(server: RedisServer) -> int:
    async with Redis.from_url(server.url) as redis:
        return int((await redis.info("commandstats")).get("cmdstat_ping", {"calls": 0})["calls"])

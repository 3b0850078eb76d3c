"""Redis behind Sentinels, and a Redis Cluster: named by a URL, and gone on with after a fail-over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from deploy.local.ports import free_port
from metadata_store import Absent, Holding, LastTurn, Put, Record, Store, StoreError, open_store
from metadata_store.redis import RedisStore
from tests.redis_server import (
    PATIENT,
    RedisServer,
    SentinelServer,
    Start,
    follow,
    form_cluster,
    opened,
    wait_for,
)
from tests.running import eventually
from tests.unit.records import record

KEYS = [f"{number:032x}" for number in range(30)]


async def does_what_a_store_promises(store: Store) -> None:
    put = {key: record(time.time() + 300, number + 1) for number, key in enumerate(KEYS)}
    told = await asyncio.gather(*(store.put(key, one) for key, one in put.items()))
    assert [before.displaced for before in told] == [None] * len(KEYS)
    assert {key: found async for key, found in store.scan()} == {key: Holding.of(one) for key, one in put.items()}
    for key, one in put.items():
        assert await store.put(key, one) == Put(one, LastTurn.of(one))
        assert await store.note_turn(key, LastTurn.of(one)) == LastTurn.of(one)
        assert await store.take(key) == one
        assert await store.take(key) is Absent.NOTHING
        assert await store.restore(key, one) is True
        assert await store.restore(key, one) is False
        assert await store.discard(key) == one
    assert [found async for found in store.scan()] == []


async def taken_when_it_answers_again(store: Store, key: str) -> Record | Absent:
    found: list[Record | Absent] = []

    async def answers() -> bool:
        with contextlib.suppress(StoreError):
            found.append(await store.take(key))
        return bool(found)

    await eventually(answers)
    return found[0]


@pytest.fixture
def service(start_redis: Start) -> Iterator[tuple[RedisServer, RedisServer, SentinelServer]]:
    """Master, replica, Sentinel."""
    master, replica = start_redis(), start_redis()
    follow(replica, master)
    sentinel = SentinelServer("kv-store", master)
    try:
        sentinel.start()
        wait_for(lambda: "slaves=1" in sentinel.text("INFO", "sentinel"), PATIENT)
        yield master, replica, sentinel
    finally:
        sentinel.close()


async def test_service_that_sentinels_watch_goes_on_after_a_fail_over_without_what_was_before(
    service: tuple[RedisServer, RedisServer, SentinelServer],
) -> None:
    master, replica, sentinel = service
    # One Sentinel that is gone must not keep the others from being asked.
    url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/kv-store/1"
    async with opened(url) as store:
        await does_what_a_store_promises(store)
        await store.put(KEYS[0], record(time.time() + 300))
        async with Redis.from_url(replica.url[:-1] + "1") as redis:

            async def copied() -> bool:
                return bool(await redis.dbsize() == 3)

            await eventually(copied)
        master.stop()
        await asyncio.to_thread(sentinel.fail_over)
        assert await taken_when_it_answers_again(store, KEYS[0]) is Absent.NOTHING
        await does_what_a_store_promises(store)
        assert "role:master" in replica.text("INFO", "replication")


async def test_sentinels_that_are_down_are_a_store_error_in_time() -> None:
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3))
    begun = time.monotonic()
    async with opened(f"redis+sentinel://{hosts}/service", 0.5) as store:
        with pytest.raises(StoreError):
            await store.take(KEYS[0])
    assert time.monotonic() - begun < 5.0


async def test_cluster_is_used_and_goes_on_after_a_fail_over_without_what_was_on_that_node(start_redis: Start) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    masters, replica = [start_redis(*options) for _ in range(3)], start_redis(*options)
    form_cluster(masters, replica)
    hosts = ",".join(f"127.0.0.1:{port}" for port in (free_port(), masters[1].port))
    rights = ("~turnback:*", "+eval", "+info", "+get", "+set", "+getdel", "+scan", "+ping", "+select")
    for server in (*masters, replica):
        server.command("ACL", "SETUSER", "router", "on", ">secret", *rights, "+cluster|slots", "+command", "+asking")
    async with opened(f"redis+cluster://router:secret@{hosts}") as store:
        await does_what_a_store_promises(store)
        for key in KEYS:
            await store.put(key, record(time.time() + 300))
        there = [int(server.command("DBSIZE")[1:]) for server in masters]
        assert sum(there) == 3 * len(KEYS)
        assert min(there) > 0
        wait_for(lambda: int(replica.command("DBSIZE")[1:]) == there[0])

        assert replica.command("CLUSTER", "FAILOVER", "TAKEOVER") == b"+OK"
        wait_for(lambda: "role:slave" in masters[0].text("INFO", "replication"))
        found = [await taken_when_it_answers_again(store, key) for key in KEYS]
        assert found.count(Absent.NOTHING) == there[0] // 3
        with contextlib.suppress(StoreError):
            assert [found async for found in store.scan()] == []
        await does_what_a_store_promises(store)
        masters[0].stop()
        await taken_when_it_answers_again(store, KEYS[0])
        await does_what_a_store_promises(store)


async def test_cluster_that_is_down_is_a_store_error_in_time() -> None:
    begun = time.monotonic()
    async with opened(f"redis+cluster://127.0.0.1:{free_port()}", 0.5) as store:
        for call in (store.take, store.discard):
            with pytest.raises(StoreError):
                await call(KEYS[0])
        with pytest.raises(StoreError):
            assert [found async for found in store.scan()]
    assert time.monotonic() - begun < 10.0


def client(url: str) -> Redis | RedisCluster:
    store = open_store(url, 1.0)
    assert isinstance(store, RedisStore)
    return store._redis


def test_what_a_sentinel_url_says_is_asked_for() -> None:
    redis = client(
        "rediss+sentinel://us%40er:pass%3Aword@one,[::1]:26380,three:1/the%2Fservice/3"
        "?sentinel_password=other&ssl_cert_reqs=none&client_name=turnback"
    )
    assert isinstance(redis, Redis)
    pool = redis.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    told = pool.connection_kwargs
    assert (told["username"], told["password"], told["db"], told["client_name"]) == (
        "us@er",
        "pass:word",
        3,
        "turnback",
    )
    assert told["ssl_cert_reqs"] == "none"
    assert pool.service_name == "the/service"
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [("one", 26379), ("::1", 26380), ("three", 1)]
    assert {(one["username"], one["password"], one["ssl_cert_reqs"]) for one in asked} == {(None, "other", "none")}
    assert all(one["retry"].get_retries() == 0 for one in (told, *asked))


def test_what_a_cluster_url_says_is_asked_for() -> None:
    redis = client("rediss+cluster://user:pass@one,two:7000/0?ssl_check_hostname=false")
    assert isinstance(redis, RedisCluster)
    assert [(node.host, node.port) for node in redis.startup_nodes] == [("one", 6379), ("two", 7000)]
    assert redis.connection_kwargs["password"] == "pass"
    assert redis.connection_kwargs["ssl_check_hostname"] is False
    assert redis.retry.get_retries() == 0


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://host",
        "redis+sentinel://host/",
        "redis+sentinel:///service",
        "redis+sentinel://one,,two/service",
        "redis+sentinel://host:port/service",
        "redis+sentinel://host/service/database",
        "redis+sentinel://host/service?no_such_option=1",
        "redis+sentinel://host/service?decode_responses=true",
        "redis+sentinel://host/service?protocol=3",
        "redis+cluster://",
        "redis+cluster://host/1",
        "redis+cluster://host?no_such_option=1",
        "redis+cluster://host?db=1",
        "redis+cluster://host?decode_responses=true",
        "redis+cluster://host?protocol=3",
        "redis+nothing://host",
    ],
)
def test_url_that_is_none_is_told_in_a_line_without_the_password(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        open_store(url.replace("://", "://:secret@", 1), 1.0)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)

"""A prompt's ids are asked for while a store elsewhere is asked for the entry, where one is known to be there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from redis.asyncio import Redis

from metadata_store.redis import RedisStore
from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse, Said
from tests.contract.fleet import renders
from tests.contract.slow_takes import SlowTakes
from tests.running import GENEROUS, eventually


@pytest.fixture
async def takes(monkeypatch: pytest.MonkeyPatch) -> SlowTakes:
    return SlowTakes(monkeypatch, RedisStore)


@pytest.fixture
async def house(make_house: MakeHouse, redis_url: str) -> AsyncIterator[House]:
    async with make_house(store=redis_url, store_timeout=GENEROUS) as house:
        yield house


def rendered(house: House) -> int:
    return sum(renders(request) for engine in house.engines for request in engine.requests)


async def second_turn(house: House) -> Json:
    """What a client sends after a first turn."""
    first = chat([user(OPENING)])
    answer = (await house.say(first)).message
    return chat([user(OPENING), answer, user("And then?")])


async def asked_ahead(house: House, takes: SlowTakes, body: Json) -> asyncio.Task[httpx.Response]:
    """A turn for which a worker was asked, and the store has not answered."""
    before = rendered(house)
    takes.slow = True
    turn = asyncio.create_task(house.proxy.post(CHAT, body, x_conversation_id="c"))
    await eventually(lambda: rendered(house) == before + 1)
    assert not turn.done()
    return turn


async def test_a_worker_is_asked_before_the_store_has_answered(house: House, takes: SlowTakes) -> None:
    body = await second_turn(house)
    before = rendered(house)
    turn = await asked_ahead(house, takes, body)
    takes.go_on()
    assert Said(await turn, CHAT).outcome == "hit"
    assert rendered(house) == before + 1, "once"


async def test_nobody_is_asked_where_no_entry_is_known_of(house: House) -> None:
    await house.say(chat([user(OPENING)]))
    assert rendered(house) == 0


async def test_an_entry_that_is_gone_costs_nothing_but_the_reuse(house: House, redis_url: str) -> None:
    body = await second_turn(house)
    async with contextlib.aclosing(Redis.from_url(redis_url)) as redis:
        await redis.flushall()
    assert (await house.say(body)).outcome == "first"
    await house.settled()


async def test_a_client_that_leaves_meanwhile_leaves_the_entry(house: House, takes: SlowTakes) -> None:
    body = await second_turn(house)
    await takes.outlast(await asked_ahead(house, takes, body))
    await eventually(lambda: house.remembers("c"))
    await house.settled()
    assert (await house.say(body)).outcome == "hit"

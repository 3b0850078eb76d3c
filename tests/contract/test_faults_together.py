"""Two turns of one conversation at once; the store goes down at any of its calls."""

from __future__ import annotations

import asyncio

import pytest

from metadata_store import Absent, Record
from metadata_store.redis import RedisStore
from tests.contract.answers import OPENING, chat, user
from tests.contract.fleet import TTL, Fleet, Json, at_request, decodes, fleet, prefills, renders, reuses
from tests.redis_server import RedisServer
from tests.running import GENEROUS, eventually
from tests.simulator import SimEngine

each = pytest.mark.parametrize("each", [1, 2])
streaming = pytest.mark.parametrize("streaming", [{}, {"stream": True}], ids=["whole", "stream"])


@each
@streaming
@pytest.mark.parametrize("turns", [2, 6])
async def test_turns_of_one_conversation_at_once_are_all_right_and_one_is_kept(
    each: int, turns: int, streaming: Json
) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        forks = [second["messages"] + [user(f"Way {number}.")] for number in range(turns)]
        for _ in range(3):
            said = await asyncio.gather(*(house.say(chat(fork, **streaming)) for fork in forks))
            assert sum(one.outcome in ("hit", "partial") for one in said) <= 1, "one entry, one reader"
        await house.afterwards("c")


@each
async def test_two_turns_at_once_while_the_entry_is_being_read(each: int) -> None:
    async with fleet(each, engines={"transfer_seconds": 0.2}) as house:
        second = await house.begun()
        one = asyncio.create_task(house.say(second))
        await eventually(lambda: any(reuses(r) for engine in house.prefill for r in engine.requests))
        assert (await house.say(second)).outcome == "first"
        assert (await one).outcome == "hit"
        await house.afterwards("c")


@each
async def test_a_conversation_deleted_while_its_turn_runs(each: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        gone: list[int] = []

        async def delete() -> None:
            gone.append((await house.proxy.client.delete("/v1/conversations/c")).status_code)

        at_request(house.prefill, reuses, delete)
        await house.say(second)
        await eventually(lambda: bool(gone))
        # 404 while the turn has the entry; 200 if it came so late that the next one was there.
        assert gone in ([404], [200])
        await house.afterwards(*(["c"] if gone == [404] else []))


# --- the store


@pytest.fixture
async def taken(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a turn has got its entry from Redis: a worker may be asked for the prompt's ids before that."""
    one = asyncio.Event()
    take = RedisStore.take

    async def noticed(store: RedisStore, key: str) -> Record | Absent:
        got = await take(store, key)
        if isinstance(got, Record):
            one.set()
        return got

    monkeypatch.setattr(RedisStore, "take", noticed)
    return one


CRASHED = "the store lost the entry: nobody knows of the blocks any more"


@each
async def test_the_store_down_when_a_turn_asks_for_its_entry(each: int, redis_server: RedisServer) -> None:
    async with fleet(each, store=redis_server.url, store_pause=0.0) as house:
        second = await house.begun()
        redis_server.stop()
        said = await house.say(second)
        assert said.reason == "store_unavailable"
        redis_server.start()
        await house.afterwards(left_to_ttl=CRASHED, deletes=False)
        await house.say(second)
        await house.afterwards("c", late="after the TTL")


@each
@pytest.mark.parametrize("moment", ["render", "prefill", "decode"])
async def test_the_store_goes_down_in_the_middle_of_a_turn(
    each: int, moment: str, redis_server: RedisServer, taken: asyncio.Event
) -> None:
    """The entry was taken; what replaces it cannot be stored, and as that is certain, it is not kept for nobody."""
    async with fleet(each, store=redis_server.url, store_pause=0.0) as house:
        second = await house.begun()

        async def stop() -> None:
            await taken.wait()
            redis_server.stop()

        when = {"render": renders, "prefill": prefills, "decode": decodes}[moment]
        at_request(house.engines, when, stop)
        assert (await house.say(second)).outcome == "hit"
        redis_server.start()
        await house.afterwards()
        await house.say(second)
        await house.afterwards("c")


@each
async def test_a_store_that_rests_after_a_failure_leaves_nothing_held(each: int, redis_server: RedisServer) -> None:
    """It is not asked at all, so it is certain that nobody will come for the blocks."""
    async with fleet(each, store=redis_server.url, store_pause=3600.0) as house:
        redis_server.stop()
        for number in range(4):
            await house.say(chat([user(OPENING)]), f"c{number}")
        await house.afterwards()


@each
async def test_the_store_down_when_an_unsent_entry_goes_back(
    each: int, redis_server: RedisServer, taken: asyncio.Event
) -> None:
    """A client leaves while its prompt is rendered, and the store cannot take the entry back."""
    async with fleet(each, store=redis_server.url, store_pause=0.0) as house:
        second = await house.begun()
        for engine in house.engines:
            engine.hang_next(when=renders)
        asking = house.asking(second)
        await eventually(lambda: any(renders(r) for engine in house.engines for r in engine.requests))
        await asyncio.wait_for(taken.wait(), GENEROUS)
        redis_server.stop()
        await house.hung_up(asking)
        for engine in house.engines:
            engine.faults.clear()
        await eventually(lambda: _failed(house, "restore"))
        redis_server.start()
        await house.afterwards()
        await house.say(second)
        await house.afterwards("c")


@each
async def test_an_unsent_entry_that_a_newer_one_has_overtaken_gives_its_blocks_back(each: int) -> None:
    """A client leaves while its prompt is rendered; its other turn has ended meanwhile."""
    async with fleet(each) as house:
        second = await house.begun()
        for engine in house.engines:
            engine.hang_next(when=renders)
        asking = house.asking(second)
        await eventually(lambda: any(renders(r) for engine in house.engines for r in engine.requests))
        assert (await house.say(second)).outcome == "first"
        await house.hung_up(asking)
        for engine in house.engines:
            engine.faults.clear()
        await house.afterwards("c")


@each
async def test_the_store_down_when_a_conversation_is_deleted(each: int, redis_server: RedisServer) -> None:
    async with fleet(each, store=redis_server.url, store_pause=0.0) as house:
        await house.begun()
        redis_server.stop()
        assert (await house.proxy.client.delete("/v1/conversations/c")).status_code == 503
        redis_server.start()
        await house.afterwards(left_to_ttl=CRASHED)


@each
async def test_the_store_down_while_retained_blocks_are_looked_after(each: int, redis_server: RedisServer) -> None:
    async with fleet(each, store=redis_server.url, store_pause=0.0, retained_watch_interval=0.05) as house:
        await house.begun()
        redis_server.stop()
        seen = len(_probes(house))
        await eventually(lambda: len(_probes(house)) > seen + 10)
        redis_server.start()
        house.cluster.clock.advance(TTL)  # the store has lost the entry: nobody knows of those blocks any more
        await house.say(chat([user(OPENING)]), "other")
        await house.afterwards("other")


async def _failed(house: Fleet, call: str) -> bool:
    return await house.proxy.metric("turnback_store_failures_total", call=call) > 0


def _probes(house: Fleet) -> list[object]:
    engines: list[SimEngine] = house.engines
    return [probe for engine in engines for probe in engine.probes]


async def test_a_store_that_came_back_fails_no_call_any_more(redis_server: RedisServer) -> None:
    """Connections that were made before it went down are not tried one after the other."""
    async with fleet(store=redis_server.url, store_pause=0.0, engines={"transfer_seconds": 0.05}) as house:
        several = [chat([user(f"{number}. {OPENING}")]) for number in range(8)]

        async def at_once() -> None:
            await asyncio.gather(*(house.say(body, f"c{number}") for number, body in enumerate(several)))

        await at_once()
        redis_server.stop()
        await house.say(several[0], "c0")
        redis_server.start()
        await house.say(several[0], "c0")
        failed = await house.proxy.metric("turnback_store_failures_total")
        await at_once()
        assert await house.proxy.metric("turnback_store_failures_total") == failed

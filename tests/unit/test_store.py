"""What every store promises: one suite for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from metadata_store import Absent, Holding, LastTurn, Record, Store, open_store
from metadata_store.base import LAST_TURN_SECONDS, TOMBSTONE_SECONDS
from metadata_store.memory import MemoryStore
from tests.redis_server import RedisServer
from tests.running import eventually
from tests.unit.records import record

KEY = "0" * 32
OTHER = "1" * 32


@dataclass
class Kit:
    """A store, its time, and as many clients of the same data as there can be."""

    store: Store
    clients: list[Store]
    now: Callable[[], float]
    reach: Callable[[float], Awaitable[None]]
    """Let the time come."""

    def later(self, turn: int = 1) -> Record:
        return record(self.now() + 300.0, turn)

    async def stored(self, store: Store | None = None) -> dict[str, Holding]:
        return {key: found async for key, found in (store or self.store).scan()}


class Hands:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture(params=["memory", "redis"])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    if request.param == "memory":
        clock = Hands()

        async def reach(moment: float) -> None:
            clock.time = max(clock.time, moment)

        store = open_store("memory://", 1.0, clock)
        await store.open()
        yield Kit(store, [store], clock, reach)
        await store.close()
        return
    server: RedisServer = request.getfixturevalue("redis_server")

    async def reach_really(moment: float) -> None:
        await eventually(lambda: time.time() > moment)

    clients = [open_store(server.url, 10.0) for _ in range(3)]
    for client in clients:
        await client.open()
    yield Kit(clients[0], clients, time.time, reach_really)
    for client in clients:
        await client.close()


async def test_entry_comes_back_as_it_was_put(kit: Kit) -> None:
    put = kit.later()
    assert (await kit.store.put(KEY, put)).displaced is None
    assert await kit.store.take(KEY) == put


async def test_entry_is_taken_once(kit: Kit) -> None:
    await kit.store.put(KEY, kit.later())
    assert isinstance(await kit.store.take(KEY), Record)
    assert await kit.store.take(KEY) is Absent.NOTHING


async def test_what_was_never_put_is_not_there(kit: Kit) -> None:
    await kit.store.put(OTHER, kit.later())
    assert await kit.store.take(KEY) is Absent.NOTHING
    assert await kit.store.discard(KEY) is None


async def test_of_many_turns_at_once_exactly_one_gets_the_entry(kit: Kit) -> None:
    for round_ in range(10):
        put = kit.later(turn=round_ + 1)
        await kit.store.put(KEY, put)
        taken = await asyncio.gather(*(kit.clients[i % len(kit.clients)].take(KEY) for i in range(30)))
        assert [found for found in taken if isinstance(found, Record)] == [put]
        assert taken.count(Absent.NOTHING) == 29


async def test_every_displaced_entry_is_told_once(kit: Kit) -> None:
    """Else its blocks were never released, or twice."""
    put = [kit.later(turn) for turn in range(1, 21)]
    displaced = await asyncio.gather(
        *(kit.clients[i % len(kit.clients)].put(KEY, one) for i, one in enumerate(put)),
    )
    left = await kit.store.take(KEY)
    assert isinstance(left, Record)
    told = [put.displaced.turn for put in displaced if put.displaced is not None]
    assert sorted([*told, left.turn]) == list(range(1, 21))


async def test_last_turn_is_told_to_the_next_whatever_became_of_its_entry(kit: Kit) -> None:
    first, second = kit.later(1), kit.later(2)
    assert (await kit.store.put(KEY, first)).before is None
    await kit.store.take(KEY)
    assert (await kit.clients[-1].put(KEY, second)).before == LastTurn.of(first)
    without_entry = LastTurn(kit.now(), LastTurn.of(first).computed)
    assert await kit.store.note_turn(KEY, without_entry) == LastTurn.of(second)
    assert (await kit.store.put(KEY, first)).before == without_entry
    assert await kit.store.note_turn(OTHER, without_entry) is None


async def test_discarding_forgets_the_last_turn_too(kit: Kit) -> None:
    await kit.store.put(KEY, kit.later())
    assert await kit.store.discard(KEY) is not None
    assert (await kit.store.put(KEY, kit.later())).before is None


async def test_last_turns_are_forgotten_after_an_hour() -> None:
    clock = Hands()
    store = MemoryStore(clock)
    for number in range(100):
        await store.put(f"{number:032x}", record(clock.time + 10))
    clock.time += LAST_TURN_SECONDS + 1
    assert (await store.put(f"{7:032x}", record(clock.time + 470.125))).before is None
    assert len(store._last_turns) == 1


async def test_entry_goes_back_after_a_turn_that_sent_nothing(kit: Kit) -> None:
    put = kit.later()
    await kit.store.put(KEY, put)
    taken = await kit.store.take(KEY)
    assert isinstance(taken, Record)
    assert await kit.store.restore(KEY, taken) is True
    assert await kit.store.take(KEY) == put


async def test_entry_that_goes_back_does_not_displace_a_newer_one(kit: Kit) -> None:
    old, new = kit.later(1), kit.later(2)
    await kit.store.put(KEY, new)
    assert await kit.store.restore(KEY, old) is False
    assert await kit.store.take(KEY) == new


async def test_of_two_that_go_back_one_does(kit: Kit) -> None:
    done = await asyncio.gather(*(kit.clients[i % len(kit.clients)].restore(KEY, kit.later(i + 1)) for i in range(10)))
    assert done.count(True) == 1
    taken = await kit.store.take(KEY)
    assert isinstance(taken, Record)
    assert done[taken.turn - 1]


async def test_entry_past_its_deadline_does_not_go_back(kit: Kit) -> None:
    assert await kit.store.restore(KEY, record(kit.now() - 1.0)) is False
    assert await kit.stored() == {}


async def test_entry_that_went_back_still_ends_at_its_deadline(kit: Kit) -> None:
    put = record(kit.now() + 0.3)
    assert await kit.store.restore(KEY, put) is True
    await kit.reach(put.deadline + 0.01)
    assert await kit.store.take(KEY) is Absent.EXPIRED


async def test_discarded_entry_is_gone_and_told(kit: Kit) -> None:
    put = kit.later()
    await kit.store.put(KEY, put)
    assert await kit.store.discard(KEY) == put
    assert await kit.store.discard(KEY) is None
    assert await kit.store.take(KEY) is Absent.NOTHING


async def test_expired_entry_is_told_once(kit: Kit) -> None:
    put = record(kit.now() + 0.3)
    await kit.store.put(KEY, put)
    await kit.reach(put.deadline + 0.01)
    assert await kit.store.take(KEY) is Absent.EXPIRED
    assert await kit.store.take(KEY) is Absent.NOTHING


async def test_taken_or_discarded_entry_never_counts_as_expired(kit: Kit) -> None:
    put = record(kit.now() + 0.3)
    for key in (KEY, OTHER):
        await kit.store.put(key, put)
    await kit.store.take(KEY)
    await kit.store.discard(OTHER)
    await kit.reach(put.deadline + 0.01)
    assert await kit.store.take(KEY) is Absent.NOTHING
    assert await kit.store.take(OTHER) is Absent.NOTHING


async def test_expired_entry_is_neither_listed_nor_displaced(kit: Kit) -> None:
    put = record(kit.now() + 0.3)
    await kit.store.put(KEY, put)
    await kit.reach(put.deadline + 0.01)
    assert await kit.stored() == {}
    assert await kit.store.discard(KEY) is None
    assert (await kit.store.put(KEY, kit.later())).displaced is None


async def test_entry_lives_to_its_own_deadline_not_to_that_of_an_earlier_one(kit: Kit) -> None:
    early, late = record(kit.now() + 0.3, turn=1), record(kit.now() + 300.0, turn=2)
    await kit.store.put(KEY, early)
    await kit.store.put(KEY, late)
    await kit.reach(early.deadline + 0.01)
    assert await kit.store.take(KEY) == late


async def test_earlier_deadline_of_a_newer_entry_holds(kit: Kit) -> None:
    await kit.store.put(KEY, kit.later(1))
    early = record(kit.now() + 0.3, turn=2)
    await kit.store.put(KEY, early)
    await kit.reach(early.deadline + 0.01)
    assert await kit.store.take(KEY) is Absent.EXPIRED


async def test_scan_lists_all_there_are_and_leaves_them(kit: Kit) -> None:
    put = {f"{number:032x}": kit.later(number + 1) for number in range(450)}
    for key, one in put.items():
        await kit.store.put(key, one)
    await kit.store.take(f"{7:032x}")
    del put[f"{7:032x}"]
    short = {key: Holding.of(one) for key, one in put.items()}
    assert await kit.stored() == short
    assert await kit.stored(kit.clients[-1]) == short


async def test_note_of_an_expiry_is_forgotten_after_an_hour() -> None:
    clock = Hands()
    store = open_store("memory://", 1.0, clock)
    await store.put(KEY, record(clock.time + 10))
    clock.time += 10 + TOMBSTONE_SECONDS
    assert await store.take(KEY) is Absent.NOTHING


async def test_memory_of_a_store_in_this_process_is_given_back() -> None:
    """Conversations that never come back must not pile up."""
    clock = Hands()
    store = open_store("memory://", 1.0, clock)
    for number in range(1000):
        await store.put(f"{number:032x}", record(clock.time + 10))
    clock.time += 10 + TOMBSTONE_SECONDS
    await store.take(KEY)
    clock.time += 1
    await store.take(KEY)
    assert [len(part) for part in vars(store).values() if isinstance(part, dict | list)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "url",
    [
        "memory",
        "memory://x",
        "http://redis:6379",
        "",
        "redis://host:port/0",
        "redis://host/0?no_such_option=1",
        "redis://host/0?decode_responses=true",
    ],
)
def test_url_of_no_store_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        open_store(url, 1.0)

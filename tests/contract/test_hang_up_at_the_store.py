"""The client hangs up while the store is asked: nothing that was taken from it is lost."""

from __future__ import annotations

import asyncio

import pytest

from metadata_store.memory import MemoryStore
from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse
from tests.contract.slow_takes import SlowTakes
from tests.running import eventually

COMPLETIONS = "/v1/completions"
IDS = list(range(100, 300))


@pytest.fixture
async def takes(monkeypatch: pytest.MonkeyPatch) -> SlowTakes:
    return SlowTakes(monkeypatch, MemoryStore)


def completion(prompt: list[int]) -> Json:
    return {"model": "sim-model", "prompt": prompt, "temperature": 0, "max_tokens": 8}


async def test_the_entry_goes_back_where_nothing_else_would_be_waited_for(house: House, takes: SlowTakes) -> None:
    """The prompt comes as ids, so nobody has to be asked for them."""
    await house.say(completion(IDS), path=COMPLETIONS)
    before = len(house.prefill.requests)
    takes.slow = True
    second = completion([*IDS, 1, 2, 3])
    await takes.outlast(asyncio.create_task(house.proxy.post(COMPLETIONS, second, x_conversation_id="c")))
    await eventually(lambda: house.remembers("c"))
    await house.settled()
    assert len(house.prefill.requests) == before, "nobody was asked anything for a client that had left"
    assert (await house.say(second, path=COMPLETIONS)).outcome == "partial"


async def test_an_entry_that_was_taken_to_make_room_is_released(make_house: MakeHouse, takes: SlowTakes) -> None:
    decode = {"num_blocks": 40, "prefix_caching": False}
    engines = {"kv_recompute_threshold": 16}
    async with make_house(engines=engines, decode=decode, retained_share=1.0, retained_watch_interval=3600) as house:
        for number in (1, 2):
            await house.say(chat(story(number)), f"c{number}")
        takes.slow = True
        await takes.outlast(asyncio.create_task(house.proxy.post(CHAT, chat(story(3)), x_conversation_id="c3")))
        await eventually(lambda: any(request.is_release for request in house.prefill.requests))
        assert not await house.remembers("c1")
        await eventually(lambda: house.remembers("c3"))
        await house.settled()
        assert len(house.decode.retained) == 2, "the second conversation's blocks, and this one's prompt"


def story(number: int) -> list[Json]:
    return [user(f"Story number {number}. {OPENING}")]

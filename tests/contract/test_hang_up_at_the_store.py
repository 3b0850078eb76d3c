"""The client hangs up while the store is asked: nothing that was taken from it is lost."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from metadata_store import Absent, Record
from metadata_store.memory import MemoryStore
from proxy.interruption import Cause, Interruption
from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse
from tests.running import GENEROUS, eventually

COMPLETIONS = "/v1/completions"
IDS = list(range(100, 300))


class SlowTakes:
    """A store whose takes have been done at once, and whose answers come late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = False
        self._taken, self._go_on, self._noticed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        take, interrupt = MemoryStore.take, Interruption.interrupt

        async def taken_late(store: MemoryStore, key: str) -> Record | Absent:
            got = await take(store, key)
            if self.slow and isinstance(got, Record):
                self._taken.set()
                await self._go_on.wait()
            return got

        def noticed(interruption: Interruption, cause: Cause) -> None:
            interrupt(interruption, cause)
            self._noticed.set()

        monkeypatch.setattr(MemoryStore, "take", taken_late)
        monkeypatch.setattr(Interruption, "interrupt", noticed)

    async def outlast(self, asking: asyncio.Task[httpx.Response]) -> None:
        """Let the client of ``asking`` leave while an entry that was taken is on its way."""
        await asyncio.wait_for(self._taken.wait(), GENEROUS)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(self._noticed.wait(), GENEROUS)
        self.slow = False
        self._go_on.set()


@pytest.fixture
async def takes(monkeypatch: pytest.MonkeyPatch) -> SlowTakes:
    return SlowTakes(monkeypatch)


def completion(prompt: list[int]) -> Json:
    return {"model": "sim-model", "prompt": prompt, "temperature": 0, "max_tokens": 8}


async def test_the_entry_goes_back_where_nothing_else_would_be_waited_for(house: House, takes: SlowTakes) -> None:
    """The prompt comes as ids, so nobody has to be asked for them."""
    await house.say(completion(IDS), path=COMPLETIONS)
    before = len(house.prefill.requests)
    takes.slow = True
    second = completion([*IDS, 1, 2, 3])
    await takes.outlast(asyncio.create_task(house.proxy.post(COMPLETIONS, second, x_conversation_id="c")))
    await eventually(lambda: _found(house, "c"))
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
        assert not await _found(house, "c1")
        await eventually(lambda: _found(house, "c3"))
        await house.settled()
        assert len(house.decode.retained) == 2, "the second conversation's blocks, and this one's prompt"


def story(number: int) -> list[Json]:
    return [user(f"Story number {number}. {OPENING}")]


async def _found(house: House, conversation: str) -> bool:
    return (await house.proxy.client.get(f"/v1/conversations/{conversation}")).status_code == 200

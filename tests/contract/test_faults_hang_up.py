"""The client hangs up, at every point of a turn: what ran for it ends, and nothing of it stays held."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import Said
from tests.contract.fleet import Fleet, Json, at_request, decodes, fleet, prefills, renders, reuses
from tests.running import eventually

each = pytest.mark.parametrize("each", [1, 2])
streaming = pytest.mark.parametrize("streaming", [{}, {"stream": True}], ids=["whole", "stream"])

FIRST = chat([user(OPENING)])
UNTOLD = "the client left before prefill's answer had told of the blocks that it keeps"


async def came(house: Fleet, when: object) -> None:
    """Wait until a worker has such a request."""
    assert callable(when)
    await eventually(lambda: any(when(r) for engine in house.engines for r in engine.requests))


def clear(house: Fleet) -> None:
    for engine in house.engines:
        engine.faults.clear()
        engine.pause_stream = None


@each
async def test_before_prefill_the_entry_goes_back(each: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        for engine in house.engines:
            engine.hang_next(when=renders)
        asking = house.asking(second)
        await came(house, renders)
        await house.hung_up(asking)
        clear(house)
        await house.afterwards("c", deletes=False)
        assert (await house.say(second)).outcome == "hit"
        await house.afterwards("c")


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_during_prefill(each: int, point: str) -> None:
    async with fleet(each) as house:
        for engine in house.prefill:
            engine.hang_next(point, when=prefills)  # type: ignore[arg-type]
        asking = house.asking(FIRST)
        await came(house, lambda r: prefills(r) and (point == "before_headers" or bool(r.request_ids)))
        await eventually(lambda: point == "before_headers" or any(engine.leased for engine in house.prefill))
        await house.hung_up(asking)
        clear(house)
        await house.afterwards(left_to_lease="" if point == "before_headers" else UNTOLD, deletes=False)
        await house.say(FIRST)
        await house.afterwards("c")


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_during_a_reusing_prefill(each: int, point: str) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        for engine in house.prefill:
            engine.hang_next(point, when=reuses)  # type: ignore[arg-type]
        asking = house.asking(second)
        await came(house, reuses)
        await eventually(lambda: point == "before_headers" or any(engine.leased for engine in house.prefill))
        await house.hung_up(asking)
        clear(house)
        late = "prefill may have read, and told so, before the client left"
        await house.afterwards(left_to_lease="" if point == "before_headers" else UNTOLD, late=late, deletes=False)
        await house.say(second)
        await house.afterwards("c", late=late)


@each
@streaming
async def test_between_prefill_and_decode(each: int, streaming: Json) -> None:
    """At the moment at which prefill's answer is there and decode was not asked yet, or hardly."""
    async with fleet(each) as house:
        hung_up: list[int] = []
        running: list[asyncio.Task[Said]] = []
        for yields in range(0, 40, 2):
            clear(house)

            async def leave(yields: int = yields) -> None:
                for _ in range(yields):
                    await asyncio.sleep(0)
                house.left.add(running[-1].get_name())
                running[-1].cancel()
                hung_up.append(yields)

            at_request(house.prefill, prefills, leave)
            running.append(house.asking(FIRST | streaming, f"c{yields}"))
            await asyncio.gather(running[-1], return_exceptions=True)
        clear(house)
        assert hung_up
        await house.hold_no_more_than_one_each()


@each
@pytest.mark.parametrize("point", ["before_headers", "after_headers"])
async def test_before_decodes_first_byte_of_a_stream(each: int, point: str) -> None:
    async with fleet(each) as house:
        for engine in house.decode:
            engine.hang_next(point, when=decodes)  # type: ignore[arg-type]
        asking = house.asking(FIRST | {"stream": True})
        await came(house, decodes)
        await house.hung_up(asking)
        clear(house)
        await house.afterwards(left_to_lease="decode hung before it read", deletes=False)
        await house.say(FIRST)
        await house.afterwards("c")


@each
async def test_while_decode_computes_a_whole_answer(each: int) -> None:
    async with fleet(each, engines={"decode_seconds_per_token": 0.2}) as house:
        asking = house.asking(FIRST)
        await eventually(lambda: any(engine.held().running and engine.busy for engine in house.decode))
        await house.hung_up(asking)
        await house.afterwards()


@each
@pytest.mark.parametrize("events", [2, 5, 9])
async def test_mid_stream(each: int, events: int) -> None:
    async with fleet(each) as house:
        second = await house.begun(stream=True)
        second["messages"][-1] = user("[long] Go on.")
        for engine in house.decode:
            engine.hang_next("mid_stream", events=events, when=decodes)
        async with house.proxy.client.stream("POST", CHAT, json=second, headers={"x-conversation-id": "c"}) as response:
            async for line in response.aiter_lines():
                if line:
                    break
        clear(house)
        await house.afterwards(deletes=False)
        await house.say(second)
        await house.afterwards("c")


@each
async def test_after_the_finish_chunk_before_the_end_mark(each: int) -> None:
    """All that decode keeps was told by then: it is remembered."""
    async with fleet(each) as house:
        gates = [asyncio.Event() for _ in house.decode]
        for engine, gate in zip(house.decode, gates, strict=True):
            engine.pause_stream = gate
        body = FIRST | {"stream": True, "stream_options": {"include_usage": True}}
        opening = asyncio.create_task(_until_finished(house, body))
        while not opening.done():
            for gate in gates:
                gate.set()
            await asyncio.sleep(0.01)
        await opening
        clear(house)
        for gate in gates:
            gate.set()
        await house.afterwards("c", deletes=False)
        assert (await house.say(FIRST)).outcome in ("hit", "partial")
        await house.afterwards("c")


async def _until_finished(house: Fleet, body: Json) -> None:
    house.conversations.add("c")
    async with house.proxy.client.stream("POST", CHAT, json=body, headers={"x-conversation-id": "c"}) as response:
        async for line in response.aiter_lines():
            if '"finish_reason":"' in line.replace(" ", ""):
                return
    raise AssertionError("the stream ended before it finished")


@each
@streaming
async def test_at_any_moment_at_all(each: int, streaming: Json) -> None:
    """Again and again, at any time of a turn, and a client that goes on in between."""
    chance = random.Random(each)
    slow = {"decode_seconds_per_token": 0.002, "prefill_seconds_per_token": 0.0002, "transfer_seconds": 0.01}
    async with fleet(each, engines=slow) as house:
        second = await house.begun()
        begin = time.monotonic()
        await house.say(second | streaming)
        whole = time.monotonic() - begin
        for _ in range(30):
            asking = house.asking(second | streaming)
            await asyncio.sleep(chance.random() * whole)
            await house.hung_up(asking)
            if chance.random() < 0.2:
                await house.say(second | streaming)
        assert house.left
        await house.hold_no_more_than_one_each()


@each
async def test_a_waiting_turn_whose_client_leaves_gives_its_place_in_the_queue_up(each: int) -> None:
    async with fleet(each, max_turns_per_worker=1) as house:
        for engine in house.prefill:
            engine.hang_next(when=prefills, times=9)
        asking = [house.asking(FIRST, f"c{number}") for number in range(4)]
        await eventually(lambda: _queued(house, 4 - each))
        for one in asking:
            await house.hung_up(one)
        clear(house)
        await house.afterwards(left_to_lease=UNTOLD, deletes=False)
        await house.say(FIRST)
        await house.afterwards("c")


async def _queued(house: Fleet, number: int) -> bool:
    return await house.proxy.metric("turnback_turns_queued") == number

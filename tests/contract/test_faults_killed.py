"""A worker's process is killed before, during or after each leg of a turn: the answer comes, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.answers import OPENING, chat, user
from tests.contract.fleet import Fleet, Json, at_request, decodes, fleet, prefills, renders, reuses
from tests.running import eventually
from tests.simulator import Point, SimEngine

each = pytest.mark.parametrize("each", [1, 2])
streaming = pytest.mark.parametrize("streaming", [{}, {"stream": True}], ids=["whole", "stream"])

FIRST = chat([user(OPENING)])
UNNOTICED: Json = {"probe_interval": 3600.0}
"""Nobody learns from a probe that a worker is gone: only the turn itself finds out."""
UNREAD = "decode died before it read what prefill holds for it"


async def kill(*engines: SimEngine) -> None:
    for engine in engines:
        await engine.stop()


async def kill_whoever_works(engines: list[SimEngine]) -> None:
    """Wait until one of them has a leg, and kill it."""
    await eventually(lambda: any(working(engine) for engine in engines))
    await kill(*(engine for engine in engines if working(engine)))


def working(engine: SimEngine) -> bool:
    return engine.alive and any((prefills(r) or decodes(r) or renders(r)) for r in engine.requests) and engine.busy > 0


def entry(house: Fleet) -> tuple[str, ...]:
    """Who could serve the turn in two legs has left an entry."""
    return ("c",) if house.several else ()


# --- prefill


@each
@streaming
async def test_prefill_killed_before_its_leg(each: int, streaming: Json) -> None:
    async with fleet(each, **UNNOTICED) as house:
        await kill(house.prefill[0])
        await house.say(FIRST | streaming)
        await house.afterwards(*entry(house))


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers"])
async def test_prefill_killed_during_its_leg(each: int, point: Point) -> None:
    async with fleet(each, **UNNOTICED) as house:
        for engine in house.prefill:
            engine.hang_next(point, when=prefills)
        asking = house.asking(FIRST)
        await kill_whoever_works(house.prefill)
        for engine in house.prefill:
            engine.faults.clear()
        said = await asking
        assert said.message == (await house.say(FIRST, "other")).message
        await house.afterwards(*(("c", "other") if house.several else ()))


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer"])
async def test_prefill_killed_while_it_reuses(each: int, point: Point) -> None:
    async with fleet(each, **UNNOTICED) as house:
        second = await house.begun()
        for engine in house.prefill:
            engine.hang_next(point, when=reuses)
        asking = house.asking(second)
        await eventually(lambda: any(reuses(r) for engine in house.prefill for r in engine.requests))
        await kill(*(engine for engine in house.prefill if any(reuses(r) for r in engine.requests)))
        for engine in house.prefill:
            engine.faults.clear()
        said = await asking
        assert said.response.status_code == 200
        await house.say(second)
        await house.afterwards(
            *entry(house),
            late="it may have read and told before it died",
            left_to_ttl="" if house.several else "nobody is left who could tell decode that it may free",
        )


@each
@streaming
async def test_prefill_killed_after_its_leg_before_decode_has_read(each: int, streaming: Json) -> None:
    async with fleet(each, engines={"transfer_seconds": 0.01}, **UNNOTICED) as house:

        async def kill_the_one_that_prefilled() -> None:
            await kill(*(engine for engine in house.prefill if any(map(prefills, engine.requests))))

        at_request(house.decode, decodes, kill_the_one_that_prefilled)
        await house.say(FIRST | streaming)
        await house.afterwards(*entry(house))


@each
async def test_prefill_killed_after_decode_has_read_is_not_noticed(each: int) -> None:
    async with fleet(each, **UNNOTICED) as house:
        for engine in house.decode:
            engine.pause_stream = asyncio.Event()
        asking = house.asking(FIRST | {"stream": True})
        await eventually(lambda: any(engine.held().running for engine in house.decode))
        await kill(*(engine for engine in house.prefill if any(map(prefills, engine.requests))))
        for engine in house.decode:
            gate, engine.pause_stream = engine.pause_stream, None
            assert gate is not None
            gate.set()
        said = await asking
        assert said.outcome == "first"
        await house.afterwards("c", deletes=house.several)


# --- decode


@each
@streaming
async def test_decode_killed_before_its_leg(each: int, streaming: Json) -> None:
    async with fleet(each, **UNNOTICED) as house:
        await kill(house.decode[0])
        await house.say(FIRST | streaming)
        await house.afterwards(*entry(house), left_to_lease=UNREAD)


@each
@streaming
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers"])
async def test_decode_killed_before_its_first_byte(each: int, point: Point, streaming: Json) -> None:
    async with fleet(each, **UNNOTICED) as house:
        for engine in house.decode:
            engine.hang_next(point, when=decodes)
        asking = asyncio.create_task(house.say(FIRST | streaming))
        if not (streaming and point == "before_answer"):
            await kill_whoever_works(house.decode)
        for engine in house.decode:
            engine.faults.clear()
        await asking
        alive = house.several or (streaming and point == "before_answer")
        await house.afterwards(*(("c",) if alive else ()), left_to_lease=UNREAD)


@each
async def test_decode_killed_mid_stream_ends_the_stream_with_an_error(each: int) -> None:
    async with fleet(each, **UNNOTICED) as house:
        for engine in house.decode:
            engine.hang_next("mid_stream", events=4, when=decodes)
        asking = house.asking(FIRST | {"stream": True})
        await eventually(lambda: any(engine.held().running for engine in house.decode))
        await kill_whoever_works(house.decode)
        text = (await asking).response.text
        assert "[DONE]" not in text
        assert '"error"' in text.strip().split("\n\n")[-1]
        for engine in house.decode:
            engine.faults.clear()
        await house.say(FIRST)
        await house.afterwards(*entry(house), left_to_lease=UNREAD)


@each
async def test_decode_killed_after_its_leg_costs_a_plain_turn(each: int) -> None:
    """And an entry of blocks that are gone is not sent, or sent and refused: never read."""
    async with fleet(each, **UNNOTICED) as house:
        second = await house.begun()
        holder = next(engine for engine in house.decode if engine.retained)
        await holder.stop()
        said = await house.say(second)
        assert said.outcome in ("failed", "stale", "hit", "partial")
        await house.afterwards(*entry(house), left_to_lease=UNREAD)


@each
async def test_decode_killed_and_noticed_serves_from_another(each: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        holder = next(engine for engine in house.decode if engine.retained)
        await holder.stop()
        await eventually(lambda: _known_down(house, holder))
        said = await house.say(second)
        assert said.reason == ("worker_down" if house.several else "role_down")
        await house.afterwards(*entry(house))


async def _known_down(house: Fleet, engine: SimEngine) -> bool:
    workers = (await house.proxy.client.get("/ready")).json()["workers"]
    return any(worker["url"] == engine.url and not worker["up"] for worker in workers)


# --- render


@each
async def test_the_renderer_killed_before_it_is_asked(each: int) -> None:
    async with fleet(each, **UNNOTICED) as house:
        second = await house.begun()
        await kill(*house.prefill[: max(1, each - 1)])
        await house.say(second)
        await house.say(second)
        await house.afterwards(*(("c",) if house.several else ()), left_to_ttl=_nobody_releases(house))


@each
@pytest.mark.parametrize("point", ["before_headers"])
async def test_the_renderer_killed_while_it_renders(each: int, point: Point) -> None:
    async with fleet(each, **UNNOTICED) as house:
        second = await house.begun()
        for engine in house.engines:
            engine.hang_next(point, when=renders)
        asking = house.asking(second)
        await eventually(lambda: any(renders(r) for engine in house.engines for r in engine.requests))
        await kill(*(engine for engine in house.engines if any(renders(r) for r in engine.requests)))
        for engine in house.engines:
            engine.faults.clear()
        assert (await asking).response.status_code == 200
        await house.say(second)
        await house.afterwards(*(("c",) if house.several else ()), left_to_ttl=_nobody_releases(house))


@each
async def test_the_renderer_killed_after_it_rendered(each: int) -> None:
    async with fleet(each, **UNNOTICED) as house:
        second = await house.begun()
        seen = [len(engine.requests) for engine in house.engines]

        async def kill_the_renderer() -> None:
            await kill(
                *(e for e, n in zip(house.engines, seen, strict=True) if any(renders(r) for r in e.requests[n:]))
            )

        at_request(house.prefill, reuses, kill_the_renderer)
        await house.say(second)
        await house.say(second)
        await house.afterwards(*entry(house), late="it read, and died", left_to_ttl=_nobody_releases(house))


def _nobody_releases(house: Fleet) -> str:
    return "" if house.several else "no prefill worker is left who could tell decode that it may free"

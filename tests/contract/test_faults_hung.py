"""A worker takes a request and then says nothing: before its headers, after them, in the middle of its answer."""

from __future__ import annotations

import pytest

from tests.contract.answers import OPENING, chat, user
from tests.contract.fleet import Json, Once, decodes, fleet, prefills, renders, reuses
from tests.simulator import Point

each = pytest.mark.parametrize("each", [1, 2])
streaming = pytest.mark.parametrize("streaming", [{}, {"stream": True}], ids=["whole", "stream"])

FIRST = chat([user(OPENING)])
PATIENT: Json = {"probe_interval": 3600.0}
LOST = "nobody was told of the blocks that prefill keeps"


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_a_prefill_that_hangs_is_given_up(each: int, point: Point) -> None:
    async with fleet(each, prefill_timeout=1.5, **PATIENT) as house:
        happens = Once(prefills)
        for engine in house.prefill:
            engine.hang_next(point, when=happens)
        assert (await house.say(FIRST)).outcome == "first"
        for engine in house.prefill:
            engine.faults.clear()
        await house.afterwards("c", left_to_lease=LOST)


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_a_prefill_that_hangs_every_time_leaves_the_turn_to_decode(each: int, point: Point) -> None:
    async with fleet(each, prefill_timeout=1.0, **PATIENT) as house:
        for engine in house.prefill:
            engine.hang_next(point, when=prefills, times=2)
        await house.say(FIRST)
        for engine in house.prefill:
            engine.faults.clear()
        await house.afterwards(left_to_lease=LOST)


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_a_reuse_that_hangs_is_given_up_and_not_sent_again(each: int, point: Point) -> None:
    async with fleet(each, prefill_timeout=1.5, **PATIENT) as house:
        second = await house.begun()
        for engine in house.prefill:
            engine.hang_next(point, when=reuses)
        assert (await house.say(second)).outcome == "failed"
        assert len([r for engine in house.prefill for r in engine.requests if reuses(r)]) == 1
        for engine in house.prefill:
            engine.faults.clear()
        await house.afterwards("c", left_to_lease=LOST, late="it may have read, and told so, before it hung")


@each
@pytest.mark.parametrize("point", ["before_headers", "after_headers"])
async def test_a_decode_stream_that_hangs_before_its_first_byte_gets_both_legs_again(each: int, point: Point) -> None:
    async with fleet(each, first_byte_timeout=1.5, **PATIENT) as house:
        happens = Once(decodes)
        for engine in house.decode:
            engine.hang_next(point, when=happens)
        said = await house.say(FIRST | {"stream": True})
        assert said.outcome == "first"
        for engine in house.decode:
            engine.faults.clear()
        await house.afterwards("c", left_to_lease="decode hung before it read")


@each
async def test_a_decode_that_hangs_after_the_role_was_named_has_not_begun(each: int) -> None:
    async with fleet(each, first_byte_timeout=1.5, **PATIENT) as house:
        happens = Once(decodes)
        for engine in house.decode:
            engine.hang_next("mid_stream", events=1, when=happens)
        await house.say(FIRST | {"stream": True})
        for engine in house.decode:
            engine.faults.clear()
        await house.afterwards("c")


@each
async def test_a_stream_that_hangs_in_the_middle_ends_with_an_error(each: int) -> None:
    async with fleet(each, gap_timeout=1.0, **PATIENT) as house:
        for engine in house.decode:
            engine.hang_next("mid_stream", events=4, when=decodes)
        text = (await house.ask(FIRST | {"stream": True})).response.text
        assert "[DONE]" not in text
        assert '"error"' in text.strip().split("\n\n")[-1]
        for engine in house.decode:
            engine.faults.clear()
        await house.afterwards()


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_a_whole_answer_that_hangs_ends_with_the_turns_time(each: int, point: Point) -> None:
    async with fleet(each, turn_timeout=2.0, **PATIENT) as house:
        for engine in house.decode:
            engine.hang_next(point, when=decodes, times=9)
        said = await house.ask(FIRST)
        assert said.response.status_code in (503, 504)
        assert "error" in said.response.json()
        for engine in house.decode:
            engine.faults.clear()
        await house.afterwards(
            left_to_lease="decode hung before it read",
            left_to_ttl=""
            if point == "before_headers"
            else "decode had finished: its answer alone tells what it keeps",
        )


@each
@streaming
async def test_a_renderer_that_hangs_costs_its_time_and_not_the_turn(each: int, streaming: Json) -> None:
    async with fleet(each, render_timeout=1.0, **PATIENT) as house:
        second = await house.begun(**streaming)
        for engine in house.engines:
            engine.hang_next("before_headers", when=renders, times=9)
        await house.say(second)
        for engine in house.engines:
            engine.faults.clear()
        assert (await house.say(second)).outcome in ("partial", "hit")
        await house.afterwards("c")

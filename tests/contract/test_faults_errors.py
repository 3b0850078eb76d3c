"""A worker says 200 and then that it failed; connections that break; workers that come and go between turns."""

from __future__ import annotations

import pytest

from tests.contract.answers import OPENING, chat, user
from tests.contract.fleet import Fleet, Json, Once, asks_health, decodes, fleet, prefills, renders, reuses
from tests.running import eventually
from tests.simulator import Fault, Point, Recorded, SimEngine

each = pytest.mark.parametrize("each", [1, 2])

FIRST = chat([user(OPENING)])
STREAM = FIRST | {"stream": True}


# --- 200, and then an error


@each
@pytest.mark.parametrize("events", [0, 1])
async def test_a_stream_that_begins_with_an_error_is_tried_again(each: int, events: int) -> None:
    async with fleet(each) as house:
        happens = Once(decodes)
        for engine in house.decode:
            engine.error_next(events=events, when=happens)
        said = await house.say(STREAM)
        assert '"error"' not in said.response.text
        await house.afterwards("c")


@each
async def test_an_error_in_the_middle_of_a_stream_is_told_and_not_remembered(each: int) -> None:
    async with fleet(each) as house:
        for engine in house.decode:
            engine.error_next(events=4, when=decodes)
        assert '"error"' in (await house.ask(STREAM)).response.text
        await house.afterwards()


def _ends_with(reason: str, params: Json | None) -> Json:
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason, "token_ids": [5]}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice], "kv_transfer_params": params}


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("told", [False, True], ids=["without-params", "with-params"])
async def test_a_stream_that_ends_with_finish_reason_error_is_not_remembered(reason: str, told: bool) -> None:
    """The engine frees at once what did not end with ``stop`` or ``length``."""
    async with fleet() as house:
        await house.say(FIRST, "earlier")
        (kept,) = house.decode[0].retained
        params = {
            "do_remote_prefill": False, "do_remote_decode": True, "remote_block_ids": [kept.blocks],
            "remote_engine_id": house.decode[0].engine_id, "remote_request_id": "gone", "remote_host": "sim-d0",
            "remote_port": house.decode[0].core.port, "remote_num_tokens": 10_000, "tp_size": 1,
        }  # fmt: skip
        house.decode[0].error_next(events=4, when=decodes, body=_ends_with(reason, params if told else None))
        said = await house.ask(STREAM)
        assert f'"finish_reason":"{reason}"' in said.response.text.replace(" ", "")
        await house.afterwards("earlier")


async def test_a_stream_that_ends_with_finish_reason_error_says_nothing_of_a_missing_plugin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fleet(log_level="warning") as house:
        house.decode[0].error_next(events=4, when=decodes, body=_ends_with("error", None))
        await house.ask(STREAM)
        assert "turnback-engine" not in capsys.readouterr().err
        assert await house.proxy.metric("turnback_answers_without_params_total") == 0
        await house.afterwards()


@each
@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_5xx_of_each_leg_is_made_up_for(each: int, status: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        for when in (reuses, prefills, decodes, renders):
            for engine in house.engines:
                engine.fail_next(status=status, when=when)
            await house.say(second)
            for engine in house.engines:
                engine.faults.clear()
        await house.afterwards(
            "c", left_to_lease="decode answered before it read", late="a reuse that was refused may have been read"
        )


# --- connections


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_a_prefill_connection_that_is_reset_costs_no_turn(each: int, point: Point) -> None:
    async with fleet(each) as house:
        happens = Once(prefills)
        for engine in house.prefill:
            engine.close_next(point, when=happens)
        assert (await house.say(FIRST)).outcome == "first"
        for engine in house.prefill:
            engine.faults.clear()
        await house.afterwards("c", left_to_lease="nobody was told of the blocks that prefill keeps")


@each
@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers", "mid_stream"])
async def test_a_reused_connection_that_is_reset_under_a_reuse_costs_no_turn(each: int, point: Point) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        for engine in house.prefill:
            engine.close_next(point, when=reuses)
        await house.say(second)
        assert len([r for engine in house.prefill for r in engine.requests if reuses(r)]) == 1
        for engine in house.prefill:
            engine.faults.clear()
        await house.afterwards(
            "c", left_to_lease="nobody was told of the blocks that prefill keeps", late="it may have been read"
        )


@each
@pytest.mark.parametrize("streaming", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize("point", ["before_headers", "after_headers"])
async def test_a_decode_connection_that_is_reset_before_the_first_byte_costs_no_turn(
    each: int, point: Point, streaming: Json
) -> None:
    async with fleet(each) as house:
        second = await house.begun(**streaming)
        happens = Once(decodes)
        for engine in house.decode:
            engine.close_next(point, when=happens)
        await house.say(second)
        for engine in house.decode:
            engine.faults.clear()
        whole = not streaming and point == "after_headers"
        await house.afterwards(
            *(() if whole else ("c",)),
            left_to_lease="decode broke off before it read",
            left_to_ttl="decode had finished: its answer alone tells what it keeps" if whole else "",
        )


@each
async def test_a_release_whose_connection_is_reset_is_sent_again(each: int) -> None:
    async with fleet(each) as house:
        await house.say(FIRST)
        happens = Once(lambda r: r.method == "POST" and r.is_release)
        for engine in house.prefill:
            engine.close_next("before_headers", when=happens)
        await house.say(FIRST, "other")
        await house.afterwards("c", "other")


# --- between turns


@each
@pytest.mark.parametrize("noticed", [True, False])
async def test_a_decode_restarted_between_turns(each: int, noticed: bool) -> None:
    async with fleet(each, probe_interval=0.05 if noticed else 3600.0) as house:
        second = await house.begun()
        holder = next(engine for engine in house.decode if engine.retained)
        before = await _generation(house, holder)
        await holder.restart()
        if noticed:
            await eventually(lambda: _changed(house, holder, before))
        said = await house.say(second)
        assert said.outcome == ("stale" if noticed else "failed")
        await house.say(second)
        await house.afterwards("c", left_to_lease="questions to the new process")


@each
async def test_a_prefill_restarted_between_turns(each: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        before = {engine.name: await _generation(house, engine) for engine in house.prefill}
        for engine in house.prefill:
            await engine.restart()
        await house.say(second)
        await house.proxy.probed()
        assert (await house.say(second)).outcome in ("hit", "partial", "first")
        for engine in house.prefill:
            await eventually(lambda engine=engine: _changed(house, engine, before[engine.name]))  # type: ignore[misc]
        await house.proxy.probed()
        await house.afterwards("c", left_to_lease="questions to the new processes")


async def _generation(house: Fleet, engine: SimEngine) -> str:
    workers = (await house.proxy.client.get("/ready")).json()["workers"]
    return str(next(worker["generation"] for worker in workers if worker["url"] == engine.url))


async def _changed(house: Fleet, engine: SimEngine, before: str) -> bool:
    return await _generation(house, engine) != before


@pytest.mark.parametrize("question", ["/v1/chat/completions", "/v1/chat/completions/render"])
async def test_a_question_about_abilities_that_fails_once_does_not_cost_reuse_for_good(question: str) -> None:
    async with fleet() as house:
        for engine in house.engines:
            engine.fail_next(status=503, when=lambda r: r.path == question and r.method == "POST")
            before = await _generation(house, engine)
            await engine.restart()
            await eventually(lambda engine=engine, before=before: _changed(house, engine, before))  # type: ignore[misc]
        await eventually(lambda: not any(engine.faults.pending for engine in house.engines))
        await house.proxy.probed()
        second = await house.begun()
        assert (await house.say(second)).outcome == "hit"


class Flapping:
    """Fails every second health probe."""

    def __init__(self, engine: SimEngine) -> None:
        self.asked = 0
        engine.faults.order(Fault("fail", self._fails, times=10_000, status=503))

    def _fails(self, request: Recorded) -> bool:
        self.asked += asks_health(request)
        return asks_health(request) and self.asked % 2 == 0


@each
async def test_flapping_health_takes_no_worker_out_and_costs_no_reuse(each: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        probes = [Flapping(engine) for engine in house.engines]
        await eventually(lambda: all(probe.asked >= 8 for probe in probes))
        assert (await house.say(second)).outcome == "hit"
        for engine in house.engines:
            engine.faults.clear()
        await house.afterwards("c")


@each
async def test_health_that_fails_for_long_and_comes_back(each: int) -> None:
    async with fleet(each) as house:
        second = await house.begun()
        holder = next(engine for engine in house.decode if engine.retained)
        holder.fail_next(status=503, times=10_000, when=asks_health)
        await eventually(lambda: _is(house, holder, up=False))
        said = await house.say(second, "meanwhile")
        assert said.reason == ("nothing_retained" if house.several else "role_down")
        holder.faults.clear()
        await eventually(lambda: _is(house, holder, up=True))
        assert (await house.say(second)).outcome == "hit", "it was never gone"
        await house.afterwards("c", *(("meanwhile",) if house.several else ()))


async def _is(house: Fleet, engine: SimEngine, *, up: bool) -> bool:
    workers = (await house.proxy.client.get("/ready")).json()["workers"]
    return any(worker["url"] == engine.url and worker["up"] is up for worker in workers)


# --- all of one role


@each
@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("streaming", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_all_of_one_role_down_is_served_by_the_other(
    each: int, role: str, noticed: bool, streaming: Json
) -> None:
    async with fleet(each, probe_interval=0.05 if noticed else 3600.0) as house:
        down = house.prefill if role == "prefill" else house.decode
        for engine in down:
            await engine.stop()
        if noticed:
            for engine in down:
                await eventually(lambda engine=engine: _is(house, engine, up=False))  # type: ignore[misc]
        for _ in range(3):
            await house.say(FIRST | streaming)
        await house.afterwards(left_to_lease="" if noticed else "no decode worker came to read")


@each
async def test_all_down_is_503_and_to_be_tried_again(each: int) -> None:
    async with fleet(each) as house:
        for engine in house.engines:
            await engine.stop()
        response = (await house.ask(FIRST)).response
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        before = {engine.name: await _generation(house, engine) for engine in house.engines}
        for engine in house.engines:
            await engine.start()
        for engine in house.engines:
            await eventually(lambda engine=engine: _is(house, engine, up=True))  # type: ignore[misc]
            await eventually(lambda engine=engine: _changed(house, engine, before[engine.name]))  # type: ignore[misc]
        await house.proxy.probed()
        await house.say(FIRST)
        await house.afterwards("c", left_to_lease="questions to the new processes")

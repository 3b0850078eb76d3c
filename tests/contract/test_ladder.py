"""What is tried, in which order, when a step fails: the client gets the right answer as long as anybody can give it."""

from __future__ import annotations

import pytest

from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse
from tests.running import eventually
from tests.simulator import Point, Recorded


def reuses(request: Recorded) -> bool:
    """Whether this is a prefill leg that reads retained blocks."""
    return request.is_prefill and bool(request.kv and request.kv.get("remote_block_ids")) and not request.is_release


def prefills(request: Recorded) -> bool:
    return request.is_prefill and not request.is_release


async def second_turn(house: House, **more: object) -> tuple[Json, Json]:
    """A conversation after its first turn: the body of the first, and of the second."""
    first = await house.say(chat([user(OPENING)], **more))
    return chat([user(OPENING)], **more), chat([user(OPENING), first.as_history, user("Go on.")], **more)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_reuse_that_prefill_answers_with_5xx_is_tried_once_more_plain(house: House, status: int) -> None:
    _, body = await second_turn(house)
    house.prefill.fail_next(status=status, when=reuses)
    said = await house.say(body)
    assert (said.outcome, said.reason, said.reused) == ("failed", "prefill_error", 0)
    legs = [r for r in house.prefill.requests if prefills(r)]
    assert [reuses(r) for r in legs] == [False, True, False]
    assert await house.proxy.metric("turnback_fallbacks_total", reason="prefill_error") == 1
    assert await house.proxy.metric("turnback_turns_total", outcome="failed", reason="prefill_error") == 1


@pytest.mark.parametrize("point", ["before_headers", "before_answer", "after_headers"])
async def test_a_reuse_whose_connection_drops_is_never_sent_again(house: House, point: Point) -> None:
    """It may have been read: the blocks may hold other tokens by now."""
    _, body = await second_turn(house)
    house.prefill.close_next(point, when=reuses)
    said = await house.say(body)
    assert (said.outcome, said.reason) == ("failed", "prefill_unreachable")
    assert len([r for r in house.prefill.requests if reuses(r)]) == 1
    assert not house.cluster.hazards
    later = await house.say(body)
    assert later.outcome in ("hit", "partial"), "the plain turn's blocks are there for the next one"


async def test_a_reuse_that_hangs_is_given_up_and_served_plain(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16}, prefill_timeout=1.0) as house:
        _, body = await second_turn(house)
        house.prefill.hang_next("before_headers", when=reuses)
        said = await house.say(body)
        assert (said.outcome, said.reason) == ("failed", "prefill_unreachable")


async def test_prefills_own_4xx_reaches_the_client_as_it_is_and_is_not_tried_again(house: House) -> None:
    body = chat([user(OPENING)], temperature=-5)
    response = await house.proxy.post(CHAT, body)
    direct = await house.proxy.client.post(house.prefill.url + CHAT, json=body)
    assert response.status_code == direct.status_code == 400
    assert response.json() == direct.json()
    assert len([r for r in house.prefill.requests if r.is_prefill]) == 1
    assert not house.decode.requests


async def test_a_refused_second_turn_does_not_cost_the_conversation_its_entry(house: House) -> None:
    _, body = await second_turn(house)
    wrong = body | {"stream_options": {"include_usage": True}}
    response = await house.proxy.post(CHAT, wrong, x_conversation_id="c")
    assert response.status_code == 400
    assert (await house.say(body)).outcome == "hit"


async def test_prefill_without_parameters_leaves_the_turn_to_decode_alone(make_house: MakeHouse) -> None:
    async with make_house(decode={"kv_recompute_threshold": 16}) as house:
        house.prefill.fail_next(status=200, body=_answer_without_params(), when=prefills)
        said = await house.say(chat([user(OPENING)]))
        assert said.outcome == "first"
        assert [r.kv for r in house.decode.requests] == [None]
        assert await house.proxy.metric("turnback_fallbacks_total", reason="prefill_without_params") == 1


def _answer_without_params() -> Json:
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 1}}


async def test_prefill_that_is_down_leaves_the_turn_to_decode_alone(house: House) -> None:
    await house.prefill.stop()
    said = await house.say(chat([user(OPENING)]))
    assert said.outcome == "first"


async def test_decode_that_is_down_leaves_the_turn_to_prefill(house: House) -> None:
    body = chat([user(OPENING)])
    await house.decode.stop()
    truth = await house.prefill.cold_answer(body)
    response = await house.proxy.post(CHAT, body, x_conversation_id="c")
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"] == truth["choices"][0]["message"]


async def test_nobody_up_is_said_with_503_in_the_apis_shape(house: House) -> None:
    for engine in house.engines:
        await engine.stop()
    response = await house.proxy.post(CHAT, chat([user(OPENING)]))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == 503
    assert "127.0.0.1" not in response.text, "addresses of workers are nobody's business outside"


@pytest.mark.parametrize("streaming", [{}, {"stream": True}])
async def test_a_decode_that_fails_before_its_first_byte_gets_both_legs_again(house: House, streaming: Json) -> None:
    house.decode.fail_next(status=500, when=lambda r: r.is_decode)
    said = await house.say(chat([user(OPENING)], **streaming))
    assert said.outcome == "first"
    assert len([r for r in house.prefill.requests if prefills(r)]) == 2, "prefilled blocks may have been read"
    assert await house.proxy.metric("turnback_fallbacks_total", reason="decode_error") == 1


async def test_a_stream_that_begins_with_an_error_is_not_begun(house: House) -> None:
    """Decode answers 200, and its role, before it knows whether it can read prefill's blocks."""
    house.decode.error_next(when=lambda r: r.is_decode, events=1)
    said = await house.say(chat([user(OPENING)], stream=True))
    assert '"error"' not in said.response.text
    assert len([r for r in house.decode.requests if r.is_decode]) == 2


async def test_an_expired_lease_on_prefill_gets_both_legs_again(house: House) -> None:
    """Decode is slow to come: what prefill held for it is gone."""
    body = chat([user(OPENING)])
    house.decode.fail_next(status=500, when=lambda r: r.is_decode, times=1)
    said = await house.say(body)
    assert said.outcome == "first"
    assert not house.cluster.hazards


async def test_an_entry_past_its_deadline_is_not_sent(make_house: MakeHouse) -> None:
    engines = {"kv_recompute_threshold": 16, "decoder_kv_blocks_ttl": 100.0}
    async with make_house(engines=engines, decoder_kv_blocks_ttl=100.0, decoder_kv_blocks_margin=10.0) as house:
        _, body = await second_turn(house)
        house.cluster.clock.advance(91)
        said = await house.say(body)
        assert (said.outcome, said.reason) == ("expired", "past_deadline")
        assert not [r for r in house.prefill.requests if reuses(r)]


async def test_just_before_its_deadline_an_entry_is_reused(make_house: MakeHouse) -> None:
    engines = {"kv_recompute_threshold": 16, "decoder_kv_blocks_ttl": 100.0}
    async with make_house(engines=engines, decoder_kv_blocks_ttl=100.0, decoder_kv_blocks_margin=10.0) as house:
        _, body = await second_turn(house)
        house.cluster.clock.advance(80)
        assert (await house.say(body)).outcome == "hit"


async def test_reuses_that_fail_below_the_ttl_are_said_to_mean_a_shorter_ttl(
    make_house: MakeHouse, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = {"kv_recompute_threshold": 16, "decoder_kv_blocks_ttl": 30.0, "refuses_unknown_reads": True}
    engines["prefix_caching"] = False
    async with make_house(engines=engines, decoder_kv_blocks_ttl=480.0) as house:
        for conversation in ("a", "b", "c"):
            first = await house.say(chat([user(OPENING)]), conversation)
            house.cluster.clock.advance(60)
            body = chat([user(OPENING), first.as_history, user("Go on.")])
            assert (await house.say(body, conversation)).outcome == "failed"
        assert "decoder_kv_blocks_ttl" in capsys.readouterr().err


async def test_what_a_restarted_decode_held_is_stale_and_never_sent(house: House) -> None:
    _, body = await second_turn(house)
    await house.decode.restart()
    await eventually(lambda: any(r.path == CHAT and r.kv is None for r in house.decode.requests))
    await house.proxy.probed()
    said = await house.say(body)
    assert (said.outcome, said.reason) == ("stale", "worker_restarted")
    assert not [r for r in house.prefill.requests if reuses(r)]


async def test_a_decode_restarted_unnoticed_costs_a_plain_prefill_and_nothing_more(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16}, probe_interval=3600) as house:
        _, body = await second_turn(house)
        await house.decode.restart()
        said = await house.say(body)
        assert said.outcome == "failed"
        assert not house.cluster.hazards

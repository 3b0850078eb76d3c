"""Where a turn's token ids come from, and that it tokenises once."""

from __future__ import annotations

import pytest

from tests.contract.answers import CHAT, OPENING, TEXT, chat, user
from tests.contract.conftest import House, MakeHouse
from tests.running import eventually
from tests.simulator import Cluster, Recorded


def legs(house: House) -> list[Recorded]:
    return [r for e in house.engines for r in e.requests if r.is_prefill or r.is_decode]


async def test_a_first_turn_asks_nobody_and_both_later_legs_get_the_ids(house: House) -> None:
    await house.say(chat([user(OPENING)]))
    prefill, decode = legs(house)
    assert len(house.prefill.requests) + len(house.decode.requests) == 2, "no extra hop"
    assert prefill.json["return_token_ids"] is True
    truth = await house.decode.cold_answer(chat([user(OPENING)]))
    assert decode.kv is not None
    assert decode.kv["prompt_token_ids"] == truth["prompt_token_ids"]


async def test_a_later_turn_renders_once_and_both_legs_get_its_ids(house: House) -> None:
    first = await house.say(chat([user(OPENING)]))
    for engine in house.engines:
        engine.requests.clear()
    body = chat([user(OPENING), first.as_history, user("Go on.")])
    await house.say(body)
    truth = await house.decode.cold_answer(body)
    prefill, decode = legs(house)
    assert [r.path for r in house.prefill.requests] == [f"{CHAT}/render", CHAT]
    for leg in (prefill, decode):
        assert leg.kv is not None
        assert leg.kv["prompt_token_ids"] == truth["prompt_token_ids"]
    assert OPENING.encode() not in prefill.raw, "a leg that has its ids needs no history"


async def test_text_completions_get_their_ids_as_the_prompt(house: House) -> None:
    body = {"model": "sim-model", "prompt": OPENING, "max_tokens": 8}
    await house.say(body, path=TEXT)
    truth = await house.decode.cold_answer(body, path=TEXT)
    _, decode = legs(house)
    assert decode.json["prompt"] == truth["choices"][0]["prompt_token_ids"]


async def test_without_render_plain_chat_is_verified_by_tokenize(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16, "offers_render": False}) as house:
        first = await house.say(chat([user(OPENING)]))
        assert (await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))).outcome == "hit"
        assert not house.cluster.hazards


async def test_what_tokenize_cannot_know_is_not_reused_without_render(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16, "offers_render": False}) as house:
        first = await house.say(chat([user(OPENING)]))
        body = chat([user(OPENING), first.as_history, user("Go on.")], reasoning_effort="high")
        said = await house.say(body)
        assert (said.outcome, said.reason) == ("unsupported", "no_token_ids")
        assert not house.cluster.hazards


async def test_an_entry_that_could_not_be_verified_went_back(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16}, render_timeout=0.3) as house:
        first = await house.say(chat([user(OPENING)]))
        body = chat([user(OPENING), first.as_history, user("Go on.")])
        for engine in house.engines:
            engine.hang_next(when=lambda r: r.path.endswith("/render"))
        said = await house.say(body)
        assert (said.outcome, said.reason) == ("unsupported", "no_token_ids")
        # Meanwhile the turn itself left a newer one; the older is given back.
        await house.settled()
        assert len(house.decode.retained) == 1


async def test_a_worker_that_does_not_render_in_time_is_not_the_only_one_asked(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16}, render_timeout=0.3) as house:
        first = await house.say(chat([user(OPENING)]))
        house.prefill.hang_next(when=lambda r: r.path.endswith("/render"))
        said = await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))
        assert said.outcome == "hit"


async def test_engines_that_tell_no_ids_at_all_are_served_plain(make_house: MakeHouse) -> None:
    async with make_house(engines={"offers_render": False, "offers_tokenize": False}) as house:
        first = await house.say(chat([user(OPENING)]))
        said = await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))
        assert (said.outcome, said.reason) == ("unsupported", "no_token_ids")


async def test_an_engine_that_ignores_given_ids_gets_the_whole_history(make_house: MakeHouse) -> None:
    """A version before 0.28: a leg without history would be answered as it stands."""
    engines = {"kv_recompute_threshold": 16, "honours_prompt_token_ids": False, "version": "0.26.0"}
    async with make_house(engines=engines) as house:
        first = await house.say(chat([user(OPENING)]))
        said = await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))
        assert said.outcome == "hit"
        await house.settled()
        assert not house.cluster.hazards
        assert all(OPENING.encode() in leg.raw for leg in legs(house) if not leg.is_release)


async def test_a_prefill_that_worked_on_other_tokens_than_verified_is_found_out(make_house: MakeHouse) -> None:
    """Its template differs from the render server's: what it computed is thrown away, and it is believed no more."""
    async with Cluster() as elsewhere:
        liar = await elsewhere.start("render")
        engines = {"kv_recompute_threshold": 16, "honours_prompt_token_ids": False}
        async with make_house(engines=engines, render=liar.url) as house:
            first = await house.say(chat([user(OPENING)]))
            history = [user(OPENING), first.as_history, user("Go on.")]
            ids = (await house.decode.cold_answer(chat(history)))["prompt_token_ids"]
            rendered = {"request_id": "r", "token_ids": [*ids, 17], "features": None}
            liar.fail_next(status=200, body=rendered, when=lambda r: r.path.endswith("/render"))
            said = await house.say(chat(history))
            assert (said.outcome, said.reason) == ("failed", "prefill_other_tokens")


async def test_what_a_worker_can_do_is_found_out_anew_after_a_restart(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16}) as house:
        probes = [r.path for r in house.prefill.requests]
        assert not probes, "once per start, not per turn"
        await house.prefill.restart()
        await eventually(lambda: any(r.path == f"{CHAT}/render" for r in house.prefill.requests))
        await house.proxy.probed()
        first = await house.say(chat([user(OPENING)]))
        assert (await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))).outcome == "hit"


async def test_a_render_server_of_its_own_is_asked_when_there_is_one(make_house: MakeHouse) -> None:
    async with Cluster() as elsewhere:
        server = await elsewhere.start("render")
        async with make_house(engines={"kv_recompute_threshold": 16}, render=server.url) as house:
            server.requests.clear()
            first = await house.say(chat([user(OPENING)]))
            assert (await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))).outcome == "hit"
            assert [r.path for r in server.requests] == [f"{CHAT}/render"]


async def test_a_render_server_that_makes_other_prompts_than_the_workers_is_not_believed(
    make_house: MakeHouse,
) -> None:
    async with Cluster() as elsewhere:
        server = await elsewhere.start("render")
        wrong = {"request_id": "r", "token_ids": [1, 2, 3], "features": None}
        server.fail_next(status=200, body=wrong, times=1000, when=lambda r: r.path.endswith("/render"))
        async with make_house(engines={"kv_recompute_threshold": 16}, render=server.url) as house:
            server.requests.clear()
            first = await house.say(chat([user(OPENING)]))
            assert (await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))).outcome == "hit"
            assert not server.requests
            assert not house.cluster.hazards


@pytest.mark.parametrize("include_reasoning", [True, False])
async def test_an_answer_whose_ids_are_hidden_is_reused_as_far_as_its_prompt(
    house: House, include_reasoning: bool
) -> None:
    body = chat([user(OPENING + "[think]")], include_reasoning=include_reasoning, max_tokens=60)
    first = await house.say(body)
    history = [user(OPENING + "[think]"), first.as_history, user("Go on.")]
    said = await house.say(chat(history))
    assert said.outcome == "partial"
    assert not house.cluster.hazards

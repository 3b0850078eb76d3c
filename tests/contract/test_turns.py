"""Whole conversations through the proxy, against engines that answer wrongly if reuse is wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.answers import CHAT, OPENING, TEXT, chat, user
from tests.contract.conftest import House, Json, MakeHouse

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


@pytest.fixture(params=["whole", "stream"])
def streaming(request: pytest.FixtureRequest) -> Json:
    return {"stream": True} if request.param == "stream" else {}


@pytest.mark.parametrize("block_size", [16, 128])
async def test_every_later_turn_reuses_and_answers_as_a_cold_prefill_would(
    make_house: MakeHouse, streaming: Json, block_size: int
) -> None:
    engines = {"kv_recompute_threshold": 16, "block_size": block_size}
    async with make_house(engines=engines) as house:
        messages = [user(OPENING)]
        outcomes, reused = [], []
        for turn in range(6):
            said = await house.say(chat(messages, **streaming))
            outcomes.append(said.outcome)
            reused.append(said.reused)
            messages += [said.as_history, user(f"And what came of it in chapter {turn}?")]
        assert outcomes == ["first", *["hit"] * 5]
        assert reused == sorted(reused)
        assert reused[1] > 16
        await house.settled()
        assert not house.cluster.hazards
        assert len(house.decode.retained) == 1, "only the newest turn may be held"
        assert not house.prefill.leased


async def test_text_completions_reuse_too(house: House, streaming: Json) -> None:
    prompt = OPENING
    outcomes = []
    for turn in range(4):
        body = {"model": "sim-model", "prompt": prompt, "temperature": 0, "max_tokens": 24, **streaming}
        said = await house.say(body, path=TEXT)
        outcomes.append(said.outcome)
        prompt += said.message["text"] + f" What of number {turn}, then? "
    assert outcomes[0] == "first"
    assert set(outcomes[1:]) <= {"hit", "partial"}
    assert not house.cluster.hazards


async def test_a_prompt_of_token_ids_is_verified_without_asking_anybody(house: House) -> None:
    ids = list(range(40, 140))
    first = await house.say({"model": "sim-model", "prompt": ids, "temperature": 0, "max_tokens": 8}, path=TEXT)
    asked = len([r for r in house.prefill.requests if r.path.endswith("/render")])
    second = await house.say({"model": "sim-model", "prompt": [*ids, 7, 8, 9], "temperature": 0}, path=TEXT)
    assert (first.outcome, second.outcome) == ("first", "partial")
    assert len([r for r in house.prefill.requests if r.path.endswith("/render")]) == asked == 0


async def test_an_answer_that_tokenises_differently_than_it_was_generated_is_cut(house: House, streaming: Json) -> None:
    messages = [user(OPENING + "[halves]")]
    first = await house.say(chat(messages, **streaming))
    said = await house.say(chat([*messages, first.as_history, user("Go on.")], **streaming))
    assert said.outcome == "partial"
    assert said.reused > 16
    assert not house.cluster.hazards


async def test_history_edited_in_the_middle_is_cut_there(house: House, streaming: Json) -> None:
    messages = [user(OPENING), {"role": "assistant", "content": "Ships sail. " * 10}, user("More of that?")]
    await house.say(chat(messages, **streaming))
    messages[1] = {"role": "assistant", "content": "Ships sail. " * 5 + "Some sink. " * 5}
    said = await house.say(chat([*messages, user("And more?")], **streaming))
    assert said.outcome == "partial"
    assert not house.cluster.hazards


async def test_history_edited_at_the_start_is_not_reused_and_its_blocks_are_freed(house: House) -> None:
    await house.say(chat([user(OPENING)]))
    said = await house.say(chat([user("Now for something else. " + OPENING)]))
    assert said.outcome == "diverged"
    await house.settled()
    assert len(house.decode.retained) == 1
    assert not house.cluster.hazards


async def test_history_cut_shorter_leaves_a_token_to_compute(house: House, streaming: Json) -> None:
    messages = [user(OPENING), {"role": "assistant", "content": "Yes. " * 30}, user("More?")]
    await house.say(chat(messages, **streaming))
    said = await house.say(chat(messages[:1], **streaming))
    assert said.outcome == "partial"
    assert not house.cluster.hazards


async def test_the_same_turn_again_is_reused_but_for_its_last_tokens(house: House) -> None:
    await house.say(chat([user(OPENING)]))
    said = await house.say(chat([user(OPENING)]))
    assert said.outcome == "partial"
    assert not house.cluster.hazards


async def test_of_two_second_turns_at_once_one_reuses_and_both_are_right(house: House, streaming: Json) -> None:
    first = await house.say(chat([user(OPENING)], **streaming))
    history = [user(OPENING), first.as_history]
    both = await asyncio.gather(
        house.say(chat([*history, user("What of the west?")], **streaming)),
        house.say(chat([*history, user("What of the east, and beyond?")], **streaming)),
    )
    assert sorted(said.outcome for said in both) == ["first", "hit"]
    await house.settled()
    assert len(house.decode.retained) == 1, "the displaced entry's blocks must be freed"
    assert not house.cluster.hazards


async def test_reasoning_that_the_template_drops_is_not_reused(house: House, streaming: Json) -> None:
    messages = [user(OPENING + "[think]")]
    first = await house.say(chat(messages, **streaming))
    said = await house.say(chat([*messages, first.as_history, user("Go on.")], **streaming))
    assert said.outcome == "partial"
    assert not house.cluster.hazards


async def test_tools_and_their_results_are_reused(house: House, streaming: Json) -> None:
    messages = [user(OPENING + "[tool]")]
    first = await house.say(chat(messages, tools=TOOLS, max_tokens=100, **streaming))
    assert first.message["tool_calls"]
    result = {"role": "tool", "tool_call_id": "call-0", "content": "Nothing was found. " * 3}
    said = await house.say(chat([*messages, first.as_history, result], tools=TOOLS, **streaming))
    assert said.outcome in ("hit", "partial")
    assert said.reused > 16
    assert not house.cluster.hazards


async def test_without_a_conversation_id_nothing_is_reused_and_nothing_stays_held(house: House) -> None:
    for _ in range(2):
        said = await house.say(chat([user(OPENING)]), conversation="")
        assert said.outcome == "none"
    await house.settled()
    assert not house.decode.held()


async def test_switched_off_nothing_is_reused_and_nothing_stays_held(make_house: MakeHouse) -> None:
    async with make_house(reuse=False) as house:
        for _ in range(2):
            said = await house.say(chat([user(OPENING)]))
            assert said.outcome == "off"
        await house.settled()
        assert not house.decode.held()


@pytest.mark.parametrize(("change", "value"), [("n", 2), ("best_of", 3), ("prompt_logprobs", 1)])
async def test_what_the_transfer_cannot_do_is_served_by_decode_alone(house: House, change: str, value: int) -> None:
    body = chat([user(OPENING)], **{change: value})
    response = await house.proxy.post(CHAT, body, x_conversation_id="c")
    assert response.status_code == 200
    assert response.headers["x-turnback-reuse"] == "unsupported"
    assert [r.kv for r in house.decode.requests] == [None]
    assert not house.prefill.requests


async def test_images_are_never_reused(house: House) -> None:
    def picture(url: str) -> list[Json]:
        parts = [{"type": "text", "text": OPENING}, {"type": "image_url", "image_url": {"url": url}}]
        return [{"role": "user", "content": parts}]

    for url in ("data:image/png;base64,AAAA", "data:image/png;base64,BBBB"):
        said = await house.say(chat(picture(url)))
        assert (said.outcome, said.reason) == ("unsupported", "media")
    assert not house.cluster.hazards


async def test_two_callers_with_the_same_conversation_id_do_not_meet(house: House) -> None:
    body = chat([user(OPENING)])
    for caller in ("Bearer one", "Bearer two"):
        response = await house.proxy.post(CHAT, body, x_conversation_id="c", authorization=caller)
        assert response.headers["x-turnback-reuse"] == "first"
    response = await house.proxy.post(CHAT, body, x_conversation_id="c", authorization="Bearer one")
    assert response.headers["x-turnback-reuse"] == "partial"


async def test_another_cache_salt_is_other_kv(house: House) -> None:
    await house.say(chat([user(OPENING)], cache_salt="one"))
    said = await house.say(chat([user(OPENING)], cache_salt="two"))
    assert said.outcome == "diverged"
    assert not house.cluster.hazards


@pytest.mark.parametrize("groups", [{"num_groups": 2, "prefix_caching": False}, {"dcp_size": 2}])
async def test_blocks_that_cannot_be_cut_are_reused_whole_or_not_at_all(make_house: MakeHouse, groups: Json) -> None:
    async with make_house(engines={"kv_recompute_threshold": 16, **groups}) as house:
        first = await house.say(chat([user(OPENING)]))
        messages = [user(OPENING), first.as_history, user("Go on.")]
        assert (await house.say(chat(messages))).outcome == "hit"
        assert (await house.say(chat(messages[:1]))).outcome == "diverged"
        assert not house.cluster.hazards


async def test_a_prefix_below_the_engines_threshold_is_not_called_reuse(make_house: MakeHouse) -> None:
    async with make_house(engines={"kv_recompute_threshold": 1000}, kv_recompute_threshold=1000) as house:
        first = await house.say(chat([user(OPENING)]))
        said = await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))
        assert (said.outcome, said.reason, said.reused) == ("unsupported", "below_threshold", 0)
        await house.settled()
        assert len(house.decode.retained) == 1


async def test_prefills_prefix_cache_cannot_be_poisoned_through_the_proxy(house: House) -> None:
    """The case of an unverified reuse: history that does not begin with what decode holds."""
    messages = [user(OPENING + "[halves]")]
    first = await house.say(chat(messages))
    changed = [*messages, {"role": "assistant", "content": "I never said that. " * 10}, user("Go on.")]
    await house.say(chat(changed))
    for caller in ("someone", "someone-else"):
        await house.say(chat(changed), conversation=caller)
        await house.say(chat([*messages, first.as_history, user("Go on.")]), conversation=caller + "-2")
    assert not house.cluster.hazards

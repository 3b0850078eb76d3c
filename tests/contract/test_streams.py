"""Streams: each event the moment it arrives, the end never told before it is one."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.answers import CHAT, DONE, OPENING, chat, chunks_of, user
from tests.contract.conftest import House, MakeHouse
from tests.running import GENEROUS, eventually


async def test_each_event_is_relayed_the_moment_it_arrives(house: House) -> None:
    """Decode holds every event back until the client has seen the one before."""
    gate = house.decode.pause_stream = asyncio.Event()
    body = chat([user(OPENING)], stream=True)
    received: list[str] = []

    async def read() -> None:
        async with house.proxy.client.stream("POST", CHAT, json=body, headers={"x-conversation-id": "c"}) as response:
            async for text in response.aiter_text():
                received.extend(part for part in text.split("\n\n") if part)

    reading = asyncio.create_task(read())
    # The role waits for the first token, so the client's first sight is of two events.
    gate.set()
    await eventually(lambda: not gate.is_set())
    while not reading.done():
        before = len(received)
        gate.set()
        await eventually(lambda before=before: len(received) > before or reading.done(), GENEROUS)  # type: ignore[misc]
    await reading
    assert received[-1] == DONE.strip()


async def test_the_entry_is_there_before_the_end_is_told(house: House) -> None:
    """A client that goes on at the very moment it reads the end must find its conversation."""
    body = chat([user(OPENING)], stream=True)
    outcomes = []
    for _ in range(5):
        async with house.proxy.client.stream("POST", CHAT, json=body, headers={"x-conversation-id": "c"}) as response:
            outcomes.append(response.headers["x-turnback-reuse"])
            async for line in response.aiter_lines():
                if line == DONE.strip():
                    break
    assert outcomes == ["first", *["partial"] * 4]


async def test_a_stream_that_breaks_off_ends_with_an_error_and_no_end_mark(house: House) -> None:
    house.decode.close_next("mid_stream", events=4, when=lambda r: r.is_decode)
    response = await house.proxy.post(CHAT, chat([user(OPENING)], stream=True), x_conversation_id="c")
    assert "[DONE]" not in response.text
    last = response.text.strip().split("\n\n")[-1]
    assert '"error"' in last
    assert (await house.say(chat([user(OPENING)]))).outcome == "first", "a broken answer is not remembered"


async def test_an_error_in_the_middle_of_a_stream_is_passed_on_and_not_remembered(house: House) -> None:
    house.decode.error_next(events=4, when=lambda r: r.is_decode)
    response = await house.proxy.post(CHAT, chat([user(OPENING)], stream=True), x_conversation_id="c")
    assert '"error"' in response.text
    assert (await house.say(chat([user(OPENING)]))).outcome == "first"


async def test_a_stream_that_hangs_ends_after_the_gap_timeout(make_house: MakeHouse) -> None:
    async with make_house(gap_timeout=0.5) as house:
        house.decode.hang_next("mid_stream", events=4, when=lambda r: r.is_decode)
        response = await house.proxy.post(CHAT, chat([user(OPENING)], stream=True))
        assert "the worker sent nothing for 0.5 s" in response.text
        assert "[DONE]" not in response.text


async def test_a_decode_whose_streams_tell_nothing_is_named_once_with_the_cure(
    make_house: MakeHouse, capsys: pytest.CaptureFixture[str]
) -> None:
    async with make_house(decode={"streams_carry_kv_params": False, "version": "0.32.0"}) as house:
        for _ in range(3):
            said = await house.say(chat([user(OPENING)], stream=True))
            assert said.outcome == "first"
        logged = capsys.readouterr().err
        assert logged.count("turnback-engine") == 1
        assert await house.proxy.metric("turnback_answers_without_params_total", mode="stream") == 3
        assert await house.proxy.metric("turnback_answers_without_params_total", worker=house.decode.url) == 3


async def test_an_answer_cut_at_a_stop_string_is_no_reason_to_complain(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine retains nothing of it; nothing is wrong with the engine."""
    whole = (await house.say(chat([user(OPENING)]))).message["content"]
    said = await house.say(chat([user(OPENING)], stop=[whole[8:12]], stream=True), "other")
    assert said.message["content"] == whole[:8]
    assert "without kv_transfer_params" not in capsys.readouterr().err
    assert (await house.say(chat([user(OPENING)]), "other")).outcome == "first"


async def test_usage_arrives_when_asked_for(house: House) -> None:
    body = chat([user(OPENING)], stream=True, stream_options={"include_usage": True})
    said = await house.say(body)
    assert said.chunks[-1]["usage"]["completion_tokens"] > 0
    assert said.chunks[-1]["choices"] == []
    assert (await house.say(body)).outcome == "partial", "usage after the parameters hides nothing"


@pytest.mark.parametrize("moment", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_the_work_at_once(house: House, moment: str) -> None:
    gate = asyncio.Event()
    if moment == "prefill":
        house.prefill.hang_next(when=lambda r: r.is_prefill)
    elif moment == "decode":
        house.decode.hang_next(when=lambda r: r.is_decode)
    else:
        house.decode.pause_stream = gate
    body = chat([user(OPENING)], stream=moment == "stream")
    asking = asyncio.create_task(house.proxy.post(CHAT, body, x_conversation_id="c"))
    engine = house.prefill if moment == "prefill" else house.decode
    await eventually(lambda: bool(engine.busy))
    asking.cancel()
    await eventually(lambda: not engine.busy)
    await eventually(lambda: not house.decode.held())
    assert await house.proxy.metric("turnback_turns_running") == 0
    workers = (await house.proxy.client.get("/ready")).json()["workers"]
    assert [worker["in_flight"] for worker in workers] == [0, 0]
    house.decode.pause_stream = None
    await house.say(chat([user(OPENING)]))


async def test_what_a_stream_says_is_complete_for_the_official_reader(house: House) -> None:
    said = await house.say(chat([user(OPENING)], stream=True))
    assert chunks_of(said.response.text)[0]["choices"][0]["delta"]["role"] == "assistant"
    assert said.response.headers["content-type"].startswith("text/event-stream")

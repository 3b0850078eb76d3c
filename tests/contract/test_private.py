"""What passes through unchanged, and what never does."""

from __future__ import annotations

import json

import pytest

from tests.contract.answers import CHAT, OPENING, TEXT, chat, user
from tests.contract.conftest import House, Json, MakeHouse


async def test_kv_parameters_from_a_client_never_reach_an_engine(house: House) -> None:
    """They would name blocks to an engine that does not ask whose they are."""
    forged = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x", "forged": True}
    for more in ({}, {"n": 2}, {"stream": True}):
        response = await house.proxy.post(CHAT, chat([user(OPENING)], kv_transfer_params=forged, **more))
        assert response.status_code == 200
    for request in (*house.prefill.requests, *house.decode.requests):
        assert b"forged" not in request.raw


@pytest.mark.parametrize("streaming", [{}, {"stream": True}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_answer_carries_no_private_fields(house: House, path: str, streaming: Json) -> None:
    body = {"model": "sim-model", "messages": [user(OPENING)], "prompt": OPENING, "max_tokens": 8, **streaming}
    response = await house.proxy.post(path, body, x_conversation_id="c")
    assert response.status_code == 200
    for private in ("kv_transfer_params", "token_ids", "remote_block_ids"):
        assert private not in response.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_token_ids_come_when_the_client_asked_for_them(house: House, path: str) -> None:
    body = {
        "model": "sim-model",
        "messages": [user(OPENING)],
        "prompt": OPENING,
        "max_tokens": 8,
        "return_token_ids": True,
    }
    truth = await house.decode.cold_answer(body, path=path)
    answer = (await house.proxy.post(path, body, x_conversation_id="c")).json()
    streamed = (await house.proxy.post(path, body | {"stream": True}, x_conversation_id="d")).text
    assert answer["choices"][0]["token_ids"] == truth["choices"][0]["token_ids"]
    assert "prompt_token_ids" in json.dumps(answer)
    assert "prompt_token_ids" in streamed
    assert "kv_transfer_params" not in json.dumps(answer) + streamed


@pytest.mark.parametrize("streaming", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_a_streams_chunks_are_those_that_decode_alone_would_have_sent(house: House, streaming: Json) -> None:
    """Fields that nobody knows, usage and all: only ids and times of the answer differ."""
    body = chat([user(OPENING + "[think]")], logprobs=True, top_logprobs=2, **streaming)
    direct = await house.proxy.client.post(house.decode.url + CHAT, json=body)
    through = await house.proxy.post(CHAT, body, x_conversation_id="c")
    assert _comparable(through.text) == _comparable(direct.text)


def _comparable(text: str) -> list[Json]:
    """The chunks (or the whole answer) without what differs between any two requests."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    found = [json.loads(event) for event in events if event != "[DONE]"]
    for part in found:
        for name in ("id", "created", "kv_transfer_params", "prompt_token_ids"):
            part.pop(name, None)
        for choice in part.get("choices", []):
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    return found


async def test_numbers_and_unknown_members_reach_decode_as_they_were_sent(house: House) -> None:
    raw = (
        b'{"model":"sim-model","messages":[{"role":"user","content":"caf\\u00e9 '
        + OPENING.encode()
        + b'"}],"temperature":0.70,"x_unknown":{"big":123456789012345678901234567890,"e":1E5},"max_tokens":4}'
    )
    response = await house.proxy.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    (sent,) = [r.raw for r in house.decode.requests if r.is_decode]
    for piece in (b'"temperature":0.70', b'{"big":123456789012345678901234567890,"e":1E5}', b"caf\\u00e9"):
        assert piece in sent


async def test_a_member_that_the_client_did_not_send_stays_absent_on_the_decode_leg(house: House) -> None:
    body = {"model": "sim-model", "messages": [user("[short] " + OPENING)]}
    await house.proxy.post(CHAT, body)
    (sent,) = [r.json for r in house.decode.requests if r.is_decode]
    assert sent.keys() == {"model", "messages", "kv_transfer_params"}


async def test_the_prefill_leg_follows_its_rules(house: House) -> None:
    body = chat(
        [user(OPENING)],
        max_completion_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
        min_tokens=3,
        logprobs=True,
        top_logprobs=3,
        response_format={"type": "json_object"},
        n=1,
        seed=7,
        conversation_id="c",
    )
    response = await house.proxy.post(CHAT, body)
    assert response.status_code == 200, response.text
    (leg,) = [r.json for r in house.prefill.requests if r.is_prefill]
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["stream"], leg["seed"]) == (1, 1, False, 7)
    dropped = {"stream_options", "min_tokens", "logprobs", "top_logprobs", "response_format", "n", "conversation_id"}
    assert not leg.keys() & dropped


async def test_a_format_that_the_prompt_may_show_stays_where_prefill_makes_the_prompt_itself(
    make_house: MakeHouse,
) -> None:
    """Prefill and decode must work on the same prompt; decode is told the format in any case."""
    async with make_house(engines={"offers_render": False, "offers_tokenize": False}) as house:
        await house.proxy.post(CHAT, chat([user(OPENING)], response_format={"type": "json_object"}))
        sent = [r.json for e in house.engines for r in e.requests if r.path == CHAT]
        assert [body["response_format"] for body in sent] == [{"type": "json_object"}] * 2


async def test_each_leg_has_a_request_id_of_its_own_and_the_clients_is_echoed(house: House) -> None:
    response = await house.proxy.post(CHAT, chat([user(OPENING)]), x_request_id="mine-1", x_conversation_id="c")
    assert response.headers["x-request-id"] == "mine-1"
    ids = [r.headers["x-request-id"] for e in house.engines for r in e.requests if r.is_prefill or r.is_decode]
    assert len(ids) == len(set(ids)) == 2
    assert "mine-1" not in ids
    assert (await house.proxy.post(CHAT, chat([user(OPENING)]))).headers["x-request-id"]


async def test_the_clients_credential_does_not_reach_a_worker_and_the_workers_key_does(make_house: MakeHouse) -> None:
    async with make_house(engines={"api_key": "worker-key"}, worker_api_key="worker-key") as house:
        response = await house.proxy.post(CHAT, chat([user(OPENING)]), authorization="Bearer of-the-client")
        assert response.status_code == 200
        for request in (*house.prefill.requests, *house.decode.requests):
            assert request.headers["authorization"] == "Bearer worker-key"


async def test_the_clients_credential_reaches_the_workers_if_the_operator_wants_it(make_house: MakeHouse) -> None:
    async with make_house(worker_api_key="of-the-router", forward_authorization=True) as house:
        first = await house.proxy.post(CHAT, chat([user(OPENING)]), authorization="Bearer mine", x_conversation_id="c")
        assert first.headers["x-turnback-reuse"] == "first"
        again = await house.proxy.post(CHAT, chat([user(OPENING)]), authorization="Bearer mine", x_conversation_id="c")
        assert again.headers["x-turnback-reuse"] == "partial"
        sent = [r for e in house.engines for r in e.requests if not r.is_release]
        assert len(sent) == 5, "two prefills, two decodes, one render"
        assert {r.headers["authorization"] for r in sent} == {"Bearer mine"}

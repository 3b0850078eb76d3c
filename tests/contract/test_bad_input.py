"""What no worker needs to be asked about."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.answers import CHAT, OPENING, TEXT, chat, user
from tests.contract.conftest import House, Json, MakeHouse


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b""),
        (CHAT, b"{"),
        (CHAT, b'{"messages": [}'),
        (CHAT, b'{"messages": "\xff'),
        (CHAT, b"[1, 2]"),
        (CHAT, b'"text"'),
        (CHAT, b"null"),
        (CHAT, b"[" * 100_000),
        (CHAT, b'{"model": "sim-model"}'),
        (CHAT, b'{"prompt": "x"}'),
        (TEXT, b'{"messages": []}'),
        (CHAT, b'{"messages": [], "conversation_id": 5}'),
        (CHAT, b'{"messages": [], "conversation_id": {"a": 1}}'),
        (CHAT, b'{"messages": [], "metadata": {"conversation_id": [1]}}'),
        (CHAT, b'{"messages": [], "prompt_cache_key": true}'),
        (CHAT, b'{"messages": [], "conversation_id": "' + b"x" * 257 + b'"}'),
    ],
)
async def test_nonsense_is_refused_before_any_worker_is_asked(house: House, path: str, body: bytes) -> None:
    response = await house.proxy.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert not house.prefill.requests + house.decode.requests


async def test_a_conversation_id_too_long_in_a_header_is_refused_by_name(house: House) -> None:
    response = await house.proxy.post(CHAT, chat([user(OPENING)]), x_conversation_id="x" * 257)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-conversation-id"


async def test_a_conversation_id_of_256_characters_is_none_too_many(house: House) -> None:
    assert (await house.say(chat([user(OPENING)]), "x" * 256)).outcome == "first"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_by_setting(make_house: MakeHouse, declared: bool) -> None:
    async with make_house(max_body_bytes=1000) as house:
        content = b'{"messages": "' + b"x" * 2000 + b'"}'

        async def pieces() -> AsyncIterator[bytes]:
            yield content

        response = await house.proxy.client.post(CHAT, content=content if declared else pieces())
        assert response.status_code == 413
        assert "max_body_bytes" in response.json()["error"]["message"]
        assert not house.prefill.requests + house.decode.requests


async def test_what_only_the_engine_can_judge_is_left_to_it(house: House) -> None:
    response = await house.proxy.post(CHAT, {"model": "no-such-model", "messages": [user("x")]})
    direct = await house.proxy.client.post(
        house.prefill.url + CHAT, json={"model": "no-such-model", "messages": [user("x")]}
    )
    assert (response.status_code, response.json()) == (direct.status_code, direct.json())


@pytest.mark.parametrize("source", ["conversation_id", "metadata", "prompt_cache_key", "x-session-id"])
async def test_each_place_of_a_conversation_id_is_looked_at(house: House, source: str) -> None:
    places: dict[str, tuple[Json, dict[str, str]]] = {
        "conversation_id": ({"conversation_id": "c"}, {}),
        "metadata": ({"metadata": {"conversation_id": "c"}}, {}),
        "prompt_cache_key": ({"prompt_cache_key": "c"}, {}),
        "x-session-id": ({}, {"x-session-id": "c"}),
    }
    more, headers = places[source]
    for expected in ("first", "partial"):
        response = await house.proxy.client.post(CHAT, json=chat([user(OPENING)], **more), headers=headers)
        assert response.headers["x-turnback-reuse"] == expected


async def test_the_endpoints_that_ask_about_the_proxy_itself(house: House) -> None:
    client = house.proxy.client
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).status_code == 200
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "sim-model"
    assert "turnback_turns" in (await client.get("/metrics")).text
    assert (await client.get(CHAT)).status_code == 405
    for engine in house.engines:
        await engine.stop()
    response = await client.get("/v1/models")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == 503

"""What /metrics says of turns is what they were: counted by hand, token by token."""

from __future__ import annotations

import pytest

from proxy.telemetry import CONTEXTS, context_of
from tests.contract.answers import CHAT, OPENING, TEXT, chat, user
from tests.contract.conftest import House, MakeHouse
from tests.running import eventually

IDS = [40 + place % 90 for place in range(1600)]
"""A prompt of 1,600 tokens."""

ADMIN = {"x-turnback-admin-key": "key"}


async def complete(house: House, ids: list[int], conversation: str | None = "c", **headers: str) -> tuple[str, int]:
    """A text turn of given ids with an answer of 8 tokens; the outcome, and what was reused."""
    body = {"model": "sim-model", "prompt": ids, "temperature": 0, "max_tokens": 8, "stream": True}
    named = {"x-conversation-id": conversation} if conversation else {}
    response = await house.proxy.client.post(TEXT, json=body, headers=named | headers)
    assert response.status_code == 200, response.text
    return response.headers["x-turnback-reuse"], int(response.headers["x-turnback-reused-tokens"])


async def fates(house: House) -> dict[str, int]:
    told = ("reused", "recomputed", "new", "unknown")
    return {fate: int(await house.proxy.metric("turnback_prompt_tokens_total", fate=fate)) for fate in told}


async def test_fates_of_prompt_tokens_add_up(make_house: MakeHouse) -> None:
    async with make_house(store="memory://") as house:
        assert await complete(house, IDS) == ("first", 0)
        assert await fates(house) == {"reused": 0, "recomputed": 0, "new": 1600, "unknown": 0}
        # The answer's tokens are not sent back: what follows is new, what was the prompt is reused.
        assert await complete(house, IDS + [7] * 400) == ("partial", 1600)
        assert await fates(house) == {"reused": 1600, "recomputed": 0, "new": 2000, "unknown": 0}
        # The blocks of 2,000 + 7 tokens expire, and the 2,000 that are sent again have to be computed again.
        house.cluster.clock.advance(471)
        assert await complete(house, IDS + [7] * 400 + [8] * 16) == ("expired", 0)
        assert await fates(house) == {"reused": 1600, "recomputed": 2000, "new": 2016, "unknown": 0}
        # Nobody can tell without a conversation.
        assert await complete(house, IDS, None) == ("none", 0)
        assert (await fates(house))["unknown"] == 1600


async def test_what_is_given_up_for_lack_of_room_is_computed_again(make_house: MakeHouse) -> None:
    """The price of pressure: such turns look like first ones otherwise."""
    async with make_house(retained_tokens_budget=0, retained_watch_interval=0.05) as house:
        await complete(house, IDS)

        async def released() -> bool:
            return await house.proxy.metric("turnback_releases_total", reason="budget") == 1

        await eventually(released)
        assert await complete(house, IDS + [7] * 400) == ("first", 0)
        assert await fates(house) == {"reused": 0, "recomputed": 1600, "new": 2000, "unknown": 0}


async def test_pause_and_age_are_measured_from_the_last_answer(make_house: MakeHouse) -> None:
    async with make_house() as house:
        for pause, count, outcome in ((0, 0, "first"), (100, 1, "partial"), (700, 2, "expired")):
            house.cluster.clock.advance(pause)
            got, _ = await complete(house, IDS + [7] * count * 32)
            assert got == outcome
        assert await house.proxy.metric("turnback_pause_seconds_count") == 2
        assert await house.proxy.metric("turnback_pause_seconds_sum") == pytest.approx(800, abs=5)
        assert await house.proxy.metric("turnback_reuse_age_seconds_count") == 1
        assert await house.proxy.metric("turnback_reuse_age_seconds_sum") == pytest.approx(100, abs=5)


async def test_legs_and_first_tokens_are_told_by_context_and_reuse(house: House) -> None:
    await complete(house, IDS)
    await complete(house, IDS + [7] * 1000)
    metric = house.proxy.metric
    for context, reused, computed, copied in (("1k-2k", "no", 1600, 0), ("2k-4k", "yes", 1000, 1600)):
        labels = {"context": context, "reused": reused}
        assert await metric("turnback_prefill_seconds_count", **labels) == 1
        assert await metric("turnback_context_ttft_seconds_count", **labels) == 1
        assert await metric("turnback_prefill_tokens_total", kind="computed", **labels) == computed
        assert await metric("turnback_prefill_tokens_total", kind="copied", **labels) == copied
    assert await metric("turnback_decode_first_token_seconds_count") == 2
    assert await metric("turnback_tpot_seconds_count", endpoint="completions") == 2
    assert await metric("turnback_output_tokens_total") == 16


async def test_with_reuse_off_it_shows_what_is_computed_again(make_house: MakeHouse) -> None:
    """The figure to look at before it is switched on."""
    async with make_house(reuse=False) as house:
        assert await complete(house, IDS[:1593]) == ("off", 0)
        assert await complete(house, IDS) == ("off", 0)
        # 1,593 of the first turn's 1,593 + 7 tokens; known to a mark of 256, since the answer was not sent back.
        assert await fates(house) == {"reused": 0, "recomputed": 1536, "new": 1593 + 64, "unknown": 0}
        await house.settled()
        assert not house.decode.retained


async def test_header_switches_reuse_off_for_who_has_the_admin_key(make_house: MakeHouse) -> None:
    async with make_house(admin_key="key") as house:
        assert await complete(house, IDS, "off", **{"x-turnback-reuse": "off"}, **ADMIN) == ("off", 0)
        assert await complete(house, IDS + [7] * 9, "off", **{"x-turnback-reuse": "off"}, **ADMIN) == ("off", 0)
        assert (await complete(house, IDS, "on", **{"x-turnback-reuse": "on"}, **ADMIN))[0] == "first"
        assert (await complete(house, IDS + [7] * 9, "on"))[0] == "partial"
        for request in (*house.prefill.requests, *house.decode.requests):
            assert "x-turnback-admin-key" not in request.headers
        await house.settled()
        assert len(house.decode.retained) == 1


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        (None, {"x-turnback-reuse": "off"}, 403),
        (None, {"x-turnback-reuse": "off", "x-turnback-admin-key": ""}, 403),
        ("key", {"x-turnback-reuse": "off"}, 403),
        ("key", {"x-turnback-reuse": "off", "x-turnback-admin-key": "no"}, 403),
        ("key", {"x-turnback-reuse": "off", "x-turnback-admin-key": "\xe4"}, 403),
        ("key", {"x-turnback-reuse": "of", "x-turnback-admin-key": "key"}, 400),
    ],
)
async def test_header_without_the_key_is_refused_and_not_ignored(
    make_house: MakeHouse, key: str | None, headers: dict[str, str], status: int
) -> None:
    async with make_house(admin_key=key) as house:
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        response = await house.proxy.client.post(CHAT, json=chat([user(OPENING)]), headers=encoded)
        assert response.status_code == status
        assert "x-turnback-reuse" in response.json()["error"]["message"]
        assert not house.decode.requests


def test_contexts_are_bounded_and_in_order() -> None:
    assert [context_of(tokens) for tokens in (0, 1024, 1025, 2048, 4096, 131_072, 131_073)] == [
        "<=1k", "<=1k", "1k-2k", "1k-2k", "2k-4k", "64k-128k", ">128k",
    ]  # fmt: skip
    assert len(CONTEXTS) == len(set(CONTEXTS)) == 9

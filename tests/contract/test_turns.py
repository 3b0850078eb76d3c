"""Whole conversations through the proxy, against engines that answer wrongly if reuse is wrong."""

from __future__ import annotations

import pytest

from tests.contract.conftest import House, Json, MakeHouse

CHAT = "/v1/chat/completions"


async def test_every_later_turn_reuses_and_answers_as_a_cold_prefill_would(house: House) -> None:
    messages: list[Json] = [{"role": "user", "content": "Tell me of the sea, please, at some length. " * 4}]
    outcomes = []
    for turn in range(5):
        body = {"model": "sim-model", "messages": messages, "temperature": 0, "max_tokens": 20}
        answer = await house.proxy.post(CHAT, body, x_conversation_id="sea")
        truth = await house.decode.cold_answer(body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"] == truth["choices"][0]["message"]
        outcomes.append(answer.headers["x-turnback-reuse"])
        messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
    assert outcomes == ["first", "hit", "hit", "hit", "hit"]
    assert not house.cluster.hazards

"""A running router is asked what to set."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.advise.command import main
from tests.contract.answers import OPENING, chat, user
from tests.contract.conftest import MakeHouse

PAUSE = 40.0
CONVERSATIONS = 20
"""As many returns as the advice needs."""


async def test_a_running_router_tells_what_to_set(make_house: MakeHouse, capsys: pytest.CaptureFixture[str]) -> None:
    async with make_house(
        engines={"kv_recompute_threshold": 16, "decoder_kv_blocks_ttl": 300.0}, decoder_kv_blocks_ttl=300,
        retained_share=0.3,
    ) as house:  # fmt: skip
        histories = []
        for number in range(CONVERSATIONS):
            asked = [user(f"{number}. {OPENING}")]
            said = await house.say(chat(asked, stream=True), f"c{number}")
            histories.append([*asked, said.as_history, user("Go on.")])
        house.cluster.clock.advance(PAUSE)
        for number, history in enumerate(histories):
            said = await house.say(chat(history, stream=True), f"c{number}")
            assert said.outcome == "hit"

        # Only the pauses are made by the simulators' clock; the turns come as fast as this test sends them.
        question = ["--url", house.proxy.url, "--turns-per-second", "0.001"]
        assert await asyncio.to_thread(main, [*question, "--json"]) == 0
        advice = json.loads(capsys.readouterr().out)
        # 40 s lie between the bounds 30 and 60 of the histogram, and the margin of 10 s has to be allowed for.
        assert advice["ttl"]["returns"] == CONVERSATIONS
        assert advice["current"] == {
            "ttl": 300,
            "threshold": 16,
            "retained_share": 0.3,
            "margin": 10,
            "origins": {"ttl": "metrics", "threshold": "metrics", "retained_share": "metrics"},
        }
        assert advice["ttl"]["recommended"] == 90
        assert advice["ttl"]["now"]["kept"] == 1
        assert advice["ttl"]["now"]["tokens"] > 0
        assert advice["ttl"]["now"]["share"] > 0
        assert advice["ttl"]["returning"] == 0.5
        assert advice["pays"]["reusing"] == 0.5
        assert [(row["context"], row["turns_off"], row["turns_on"]) for row in advice["pays"]["rows"]] == [
            ("<=1k", CONVERSATIONS, CONVERSATIONS)
        ]
        # Every prompt was about as long as the others: no speeds can be told from that.
        assert advice["threshold"]["verdict"] == "cannot tell"
        assert advice["threshold"]["prompts"] == 2 * CONVERSATIONS

        assert await asyncio.to_thread(main, question) == 0
        assert "Set 90, on decode and on the router." in capsys.readouterr().out

"""Conversations on the real pair: with reuse, token for token what is answered without."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from deploy.local.pair import Pair
from tests.contract.answers import CHAT, TEXT
from tests.e2e.answers import prompt_ids_of, said
from tests.e2e.conftest import Json, Proxies

pytestmark = pytest.mark.e2e

STORY = "def sail(ship, sea):\n    return [wave for wave in sea if ship.meets(wave)]\n\n" * 8

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a name up in the harbour's book.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}},
                "required": ["name"],
            },
        },
    }
]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_six_turns_of_chat(proxies: Proxies, streaming: Json) -> None:
    """The model's own text: its tokens seldom come back as they were generated, so it is cut there."""
    messages = [user(STORY)]
    reused = []
    for turn in range(6):
        body = {"messages": messages, "max_tokens": 24, **streaming}
        answered = await proxies.turn_as_expected(CHAT, body, "six")
        reused.append(answered.reused)
        messages += [said(answered.on, CHAT), user(f"What of the {turn + 2}nd ship, and of its crew?")]
    assert reused[0] == 0
    assert all(earlier < later for earlier, later in itertools.pairwise(reused)), reused


async def test_six_turns_in_which_everything_held_is_reused(
    proxies: Proxies, streaming: Json, stable_tokens: list[int]
) -> None:
    """Answers made of tokens that come back as they were generated: each later turn is a whole hit."""
    messages = [user(STORY)]
    outcomes = []
    for turn in range(6):
        body = {"messages": messages, "max_tokens": 24, "allowed_token_ids": stable_tokens, **streaming}
        answered = await proxies.turn_as_expected(CHAT, body, "stable")
        outcomes.append(answered.outcome)
        messages += [said(answered.on, CHAT), user(f"What of the {turn + 2}nd ship, and of its crew?")]
    assert outcomes == ["first", *["hit"] * 5]


@pytest.fixture
async def stable_tokens(pair: Pair) -> list[int]:
    """Ids of words that no tokenizer would merge with each other."""
    async with httpx.AsyncClient(base_url=pair.decode.url, timeout=60) as client:
        found = []
        for word in (" return", " self", " import", " class"):
            ids = (await client.post("/tokenize", json={"prompt": word, "add_special_tokens": False})).json()["tokens"]
            if len(ids) == 1:
                found += ids
    assert found
    return found


async def test_six_turns_of_text_completion(proxies: Proxies, streaming: Json) -> None:
    prompt = STORY
    outcomes = []
    for turn in range(6):
        body = {"prompt": prompt, "max_tokens": 24, **streaming}
        answered = await proxies.turn_as_expected(TEXT, body, "text")
        outcomes.append(answered.outcome)
        prompt += said(answered.on, TEXT)["text"] + f"\n# ship number {turn}\n"
    assert outcomes[0] == "first"
    assert set(outcomes[1:]) <= {"hit", "partial"}


async def test_a_prompt_of_token_ids(proxies: Proxies, streaming: Json) -> None:
    prompt = list(range(300, 700))
    outcomes = []
    for _ in range(3):
        answered = await proxies.turn_as_expected(TEXT, {"prompt": prompt, "max_tokens": 16, **streaming}, "ids")
        outcomes.append(answered.outcome)
        prompt = [*proxies.held["ids"], 5, 6, 7, 8]
    assert outcomes == ["first", "hit", "hit"]


async def test_an_answer_that_tokenises_differently_than_it_was_generated(proxies: Proxies, streaming: Json) -> None:
    """Letters one by one, which come back as words."""
    letters = await _ids(proxies, "abcdefghijklmnopqrstuvwxyz")
    messages = [user(STORY)]
    body = {"messages": messages, "max_tokens": 40, "allowed_token_ids": letters, "min_tokens": 40, **streaming}
    first = await proxies.turn_as_expected(CHAT, body, "letters")
    again = {"messages": [*messages, said(first.on, CHAT), user("Go on.")], "max_tokens": 24, **streaming}
    second = await proxies.turn_as_expected(CHAT, again, "letters")
    assert second.outcome == "partial"


async def _ids(proxies: Proxies, letters: str) -> list[int]:
    worker = proxies.on.settings.decode[0]
    async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
        found = []
        for letter in letters:
            ids = (await client.post("/tokenize", json={"prompt": letter, "add_special_tokens": False})).json()
            assert len(ids["tokens"]) == 1
            found += ids["tokens"]
    return found


async def test_history_edited_in_the_middle(proxies: Proxies, streaming: Json) -> None:
    messages = [user(STORY), {"role": "assistant", "content": "if ship: return 1\n" * 12}, user("Why?")]
    await proxies.turn_as_expected(CHAT, {"messages": messages, "max_tokens": 24, **streaming}, "edited")
    messages[1] = {"role": "assistant", "content": "if ship: return 1\n" * 6 + "while sea: sink()\n" * 6}
    again = {"messages": [*messages, user("And now?")], "max_tokens": 24, **streaming}
    second = await proxies.turn_as_expected(CHAT, again, "edited")
    assert second.outcome == "partial"


async def test_history_edited_at_its_start(proxies: Proxies, streaming: Json) -> None:
    await proxies.turn_as_expected(CHAT, {"messages": [user(STORY)], "max_tokens": 24, **streaming}, "start")
    again = {"messages": [user("Read this:\n" + STORY)], "max_tokens": 24, **streaming}
    second = await proxies.turn_as_expected(CHAT, again, "start")
    assert second.outcome == "diverged"


async def test_history_cut_shorter(proxies: Proxies, streaming: Json) -> None:
    messages = [user(STORY), {"role": "assistant", "content": "if ship: return 1\n" * 12}, user("Why?")]
    await proxies.turn_as_expected(CHAT, {"messages": messages, "max_tokens": 24, **streaming}, "cut")
    again = {"messages": messages[:1], "max_tokens": 24, **streaming}
    second = await proxies.turn_as_expected(CHAT, again, "cut")
    assert second.outcome == "partial"


async def test_the_very_same_prompt_again(proxies: Proxies, streaming: Json) -> None:
    body = {"messages": [user(STORY)], "max_tokens": 24, **streaming}
    await proxies.turn_as_expected(CHAT, body, "same")
    second = await proxies.turn_as_expected(CHAT, body, "same")
    assert second.outcome == "partial"


async def test_two_second_turns_at_the_same_time(proxies: Proxies, streaming: Json) -> None:
    first = await proxies.turn(CHAT, {"messages": [user(STORY)], "max_tokens": 24, **streaming}, "two")
    history = [user(STORY), said(first.on, CHAT)]
    both = await asyncio.gather(
        *(
            proxies.turn(CHAT, {"messages": [*history, user(question)], "max_tokens": 24, **streaming}, "two")
            for question in ("What of the west?", "What of the east, and of what lies beyond it?")
        )
    )
    assert sorted(turn.outcome for turn in both) in (["first", "hit"], ["first", "partial"])


async def test_a_template_that_drops_reasoning(proxies: Proxies, streaming: Json) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 40, **streaming}
    messages = [user(STORY)]
    first = await proxies.turn_as_expected(CHAT, {"messages": messages, **thinking}, "think")
    again = {"messages": [*messages, said(first.on, CHAT), user("Go on.")], **thinking}
    second = await proxies.turn_as_expected(CHAT, again, "think")
    assert second.outcome == "partial"
    assert second.reused < len(prompt_ids_of(first.on)), "the opening of the reasoning must not be reused"


async def test_tools(proxies: Proxies, streaming: Json) -> None:
    messages = [user(STORY)]
    forced = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}, **streaming}
    first = await proxies.turn_as_expected(CHAT, {"messages": messages, "max_tokens": 64, **forced}, "tools")
    called = said(first.on, CHAT)
    assert called["tool_calls"][0]["function"]["name"] == "look_up"
    result = {"role": "tool", "tool_call_id": "call-0", "content": "No such name in the book.\n" * 6}
    body = {"messages": [*messages, called, result], "tools": TOOLS, "max_tokens": 24, **streaming}
    second = await proxies.turn_as_expected(CHAT, body, "tools")
    assert second.outcome in ("hit", "partial")

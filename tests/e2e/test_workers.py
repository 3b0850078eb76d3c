"""Real workers that die, and a real KV cache that is full."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from deploy.local.options import EngineOptions
from deploy.local.pair import Engine, Pair
from tests.contract.answers import CHAT
from tests.e2e.answers import ids_of, said
from tests.e2e.conftest import PATIENCE, Json, both, settings
from tests.e2e.decode_memory import held_blocks
from tests.e2e.test_conversations import STORY, user
from tests.running import Running, eventually, running

pytestmark = pytest.mark.e2e

SMALL_CACHE_BLOCKS = 40
"""Of 128 tokens each: room for a few conversations of this file's length."""


async def test_decode_killed_in_the_middle_of_a_stream_and_started_again(pair: Pair) -> None:
    """The stream ends with an error and no end mark; the conversation goes on when decode is back."""
    async with both(pair) as proxies:
        messages = [user(STORY)]
        first = await proxies.turn(CHAT, {"messages": messages, "max_tokens": 16}, "killed")
        messages += [said(first.on, CHAT), user("Tell it all.")]
        body: Json = {"model": "tiny", "messages": messages, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        events = []
        async with proxies.on.client.stream("POST", CHAT, json=body, headers={"x-conversation-id": "killed"}) as answer:
            assert answer.headers["x-turnback-reuse"] in ("hit", "partial")
            async for line in answer.aiter_lines():
                events.append(line)
                if len(events) == 10:
                    pair.decode.kill()
        text = "\n".join(events)
        assert "[DONE]" not in text
        assert '"error"' in text

        # Prefill alone serves turns meanwhile.
        meanwhile = await proxies.on.post(CHAT, {"model": "tiny", "messages": messages, "max_tokens": 8})
        assert meanwhile.status_code == 200

        pair.decode.restart()
        pair.decode.wait_ready()
        for proxy in (proxies.on, proxies.off):
            await proxy.probed()
        outcomes = []
        for turn in range(3):
            answered = await proxies.turn(CHAT, {"messages": messages, "max_tokens": 16}, "killed")
            outcomes.append(answered.outcome)
            messages += [said(answered.on, CHAT), user(f"And {turn}?")]
        assert outcomes[0] in ("first", "stale", "unsupported")
        assert set(outcomes[1:]) <= {"hit", "partial"}


async def test_a_deleted_conversation_and_a_displaced_turn_give_their_blocks_back(pair: Pair) -> None:
    async with running(settings(pair)) as proxy:
        proxy.client.timeout = httpx.Timeout(PATIENCE)
        await proxy.probed()
        before = await held_blocks(pair.decode)
        body: Json = {"model": "tiny", "temperature": 0, "messages": [user(STORY)], "max_tokens": 16}
        await proxy.post(CHAT, body, x_conversation_id="deleted")
        one = await held_blocks(pair.decode) - before
        assert one > 0
        again = await proxy.post(CHAT, body, x_conversation_id="deleted")
        assert again.headers["x-turnback-reuse"] == "partial"
        await eventually(lambda: _holds(pair.decode, before + one), PATIENCE)
        deleted = await proxy.client.delete("/v1/conversations/deleted")
        assert deleted.status_code == 200
        await eventually(lambda: _holds(pair.decode, before), PATIENCE)


async def _holds(engine: Engine, blocks: float) -> bool:
    return await held_blocks(engine) <= blocks


@pytest.fixture(scope="module")
def small_decode(pair: Pair) -> Iterator[Engine]:
    """A second decode engine whose KV cache holds a few conversations only."""
    options = EngineOptions("decode", num_gpu_blocks_override=SMALL_CACHE_BLOCKS, max_model_len=4096)
    engine = Engine(options)
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


@pytest.fixture
async def crowded(pair: Pair, small_decode: Engine) -> AsyncIterator[Running]:
    """A proxy in front of it, that watches over nothing by itself: what is full stays full until a turn comes."""
    chosen = settings(pair, decode=[small_decode.url], retained_share=1.0, retained_watch_interval=3600)
    async with running(chosen) as proxy:
        proxy.client.timeout = httpx.Timeout(PATIENCE)
        await proxy.probed()
        yield proxy


async def test_on_a_full_decode_new_conversations_get_their_first_token_as_on_an_empty_one(
    crowded: Running, small_decode: Engine, pair: Pair
) -> None:
    """Without release they would wait for the TTL of what is retained: minutes, not moments."""

    async def first_token(name: str) -> float:
        # Each with a beginning of its own, so that nothing of it is known already.
        messages = [user(f"# {name}\n" + STORY * 2)]
        body = {"model": "tiny", "messages": messages, "max_tokens": 16, "stream": True}
        begin = time.monotonic()
        async with crowded.client.stream("POST", CHAT, json=body, headers={"x-conversation-id": name}) as answer:
            assert answer.status_code == 200
            seconds = None
            async for line in answer.aiter_lines():
                if seconds is None and '"content":"' in line and '"content":""' not in line:
                    seconds = time.monotonic() - begin
        assert seconds is not None
        return seconds

    empty = [await first_token(f"empty-{number}") for number in range(2)]
    while await held_blocks(small_decode) < SMALL_CACHE_BLOCKS * 0.7:
        await first_token(f"filling-{time.monotonic()}")
    full = [await first_token(f"new-{number}") for number in range(10)]
    # Generous against a noisy machine, and far below the TTL that they would wait for.
    assert max(full) < max(10.0, 10 * max(empty)), (empty, full)
    assert await crowded.metric("turnback_releases_total", reason="pressure", result="released") > 0


async def test_ids_are_right_on_a_small_decode_too(crowded: Running, pair: Pair) -> None:
    body: Json = {"model": "tiny", "temperature": 0, "return_token_ids": True, "max_tokens": 24}
    async with running(settings(pair, reuse=False)) as honest:
        honest.client.timeout = httpx.Timeout(PATIENCE)
        await honest.probed()
        for number in range(6):
            asked = body | {"messages": [user(f"# {number % 3}\n" + STORY * 2), user("Go on. " * (number // 3 + 1))]}
            answer = await crowded.post(CHAT, asked, x_conversation_id=f"c{number % 3}")
            assert ids_of(answer) == ids_of(await honest.post(CHAT, asked))

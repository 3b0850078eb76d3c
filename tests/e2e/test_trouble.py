"""The real pair in trouble: a store that goes, a prefix cache that could be poisoned, memory that must come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.local.options import EngineOptions
from deploy.local.pair import Engine, Pair
from tests.contract.answers import CHAT
from tests.e2e.answers import ids_of, said
from tests.e2e.conftest import PATIENCE, Json, both, settings
from tests.e2e.decode_memory import held_blocks
from tests.e2e.test_conversations import STORY, user
from tests.redis_server import RedisServer
from tests.running import eventually, running

pytestmark = pytest.mark.e2e


async def test_redis_stopped_in_a_conversation_and_started_again_fails_no_turn(
    pair: Pair, redis_server: RedisServer
) -> None:
    async with both(pair, store=redis_server.url, store_pause=0.0) as proxies:
        messages = [user(STORY)]
        outcomes = []
        for turn in range(6):
            if turn == 2:
                redis_server.stop()
            if turn == 3:
                redis_server.start()
            body = {"messages": messages, "max_tokens": 16, "stream": turn % 2 == 0}
            answered = await proxies.turn(CHAT, body, "redis")
            outcomes.append(answered.outcome)
            messages += [said(answered.on, CHAT), user(f"And {turn}?")]
        assert [outcomes[0], *outcomes[2:4]] == ["first", "failed", "first"]
        assert {outcomes[1], *outcomes[4:]} <= {"hit", "partial"}


@pytest.fixture
def caching_prefill(pair: Pair) -> Iterator[Engine]:
    """A second prefill engine, with its prefix cache on."""
    engine = Engine(EngineOptions("prefill", prefix_caching=True))
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


async def test_prefills_prefix_cache_is_not_poisoned(pair: Pair, caching_prefill: Engine) -> None:
    """A careless router's history: decode holds other tokens than the new prompt begins with.

    Through the proxy, the prompt's later answers are right for everybody. The same thing done by hand, without
    verification, spoils them: so this test could tell.
    """
    first: Json = {"messages": [user(STORY)], "max_tokens": 24, "stream": False, **_EXACT}
    changed: Json = {"messages": [user("Never mind. " + STORY + "Think again.")], "max_tokens": 24, **_EXACT}
    spoiled: Json = {"messages": [user("Instead: " + STORY + "Think again.")], "max_tokens": 24, **_EXACT}
    async with (
        running(settings(pair, prefill=[caching_prefill.url])) as proxy,
        running(settings(pair, reuse=False)) as honest,
    ):
        for each in (proxy, honest):
            each.client.timeout = httpx.Timeout(PATIENCE)
            await each.probed()
        truth = {name: ids_of(await honest.post(CHAT, body)) for name, body in (("c", changed), ("s", spoiled))}

        await proxy.post(CHAT, first, x_conversation_id="victim")
        edited = await proxy.post(CHAT, changed, x_conversation_id="victim")
        assert edited.headers["x-turnback-reuse"] == "diverged"
        assert ids_of(edited) == truth["c"]
        for caller in range(3):
            again = await proxy.post(CHAT, changed, x_conversation_id=f"somebody-{caller}")
            assert ids_of(again) == truth["c"]

        await _reuse_unverified(pair, caching_prefill, first, spoiled)
        wrong = await proxy.post(CHAT, spoiled, x_conversation_id="somebody-else")
        assert ids_of(wrong) != truth["s"]


_EXACT = {"model": "tiny", "temperature": 0, "return_token_ids": True}
_FIRST = {"do_remote_decode": True, "do_remote_prefill": False}


async def _reuse_unverified(pair: Pair, prefill: Engine, first: Json, second: Json) -> None:
    """Two turns as a router that verifies nothing does them."""
    async with httpx.AsyncClient(timeout=PATIENCE) as client:

        async def post(engine: Engine, body: Json, params: Any, **more: Any) -> Any:
            sent = body | {"kv_transfer_params": params} | more
            answer = await client.post(engine.url + CHAT, json=sent)
            answer.raise_for_status()
            return answer.json()["kv_transfer_params"]

        one = await post(prefill, first, _FIRST, max_tokens=1)
        held = await post(pair.decode, first, one)
        two = await post(prefill, second, held | _FIRST, max_tokens=1)
        await post(pair.decode, second, two)


async def test_what_nobody_will_read_is_given_back_to_decode(pair: Pair) -> None:
    """Diverged and unwanted blocks do not wait for the engine's TTL; seen on decode's own metrics."""
    async with running(settings(pair)) as proxy:
        proxy.client.timeout = httpx.Timeout(PATIENCE)
        await proxy.probed()
        before = await held_blocks(pair.decode)
        one = {**_EXACT, "messages": [user(STORY)], "max_tokens": 16}
        other = {**_EXACT, "messages": [user("Another beginning. " + STORY)], "max_tokens": 16}
        await proxy.post(CHAT, one, x_conversation_id="give-back")
        held = await held_blocks(pair.decode)
        assert held > before, "decode retains the first turn"
        await proxy.post(CHAT, other, x_conversation_id="give-back")
        await proxy.post(CHAT, one)
        # One conversation's newest turn is all that may stay.
        await eventually(lambda: _as_few(pair, held), PATIENCE)
        assert await proxy.metric("turnback_releases_total", reason="diverged", result="released") == 1
        assert await proxy.metric("turnback_releases_total", reason="unwanted", result="released") == 1


async def _as_few(pair: Pair, held: float) -> bool:
    return await held_blocks(pair.decode) <= held

"""A real decode server with two data-parallel ranks: each conversation has its blocks on one, and stays there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from deploy.local.options import EngineOptions
from deploy.local.pair import Engine, Pair
from proxy.vitals import Exposition
from tests.contract.answers import CHAT
from tests.e2e.answers import said
from tests.e2e.conftest import DECODER_TTL, PATIENCE, Json, Proxies, both
from tests.e2e.test_conversations import STORY, user
from tests.running import eventually

pytestmark = pytest.mark.e2e

RANKS = 2


@pytest.fixture(scope="module")
def ranked_decode(pair: Pair) -> Iterator[Engine]:
    """A second decode server, with an engine for each rank."""
    engine = Engine(EngineOptions("decode", decoder_kv_blocks_ttl=DECODER_TTL, data_parallel_size=RANKS))
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


async def held_by_rank(engine: Engine) -> list[int]:
    """KV blocks in use on each rank, as the engines tell."""
    async with httpx.AsyncClient(timeout=60) as client:
        shown = Exposition((await client.get(f"{engine.url}/metrics")).text)
    held = []
    for rank in range(RANKS):
        seen = shown.of(rank)
        assert seen.num_blocks is not None
        assert seen.kv_usage is not None
        held.append(round(seen.kv_usage * seen.num_blocks))
    return held


async def retained(proxies: Proxies, conversation: str) -> Json:
    """What the reusing proxy remembers of it."""
    (found,) = (await proxies.on.client.get(f"/v1/conversations/{conversation}")).json()["retained"]
    entry: Json = found
    return entry


async def test_two_conversations_on_two_ranks_reuse_each_what_its_own_rank_holds(
    pair: Pair, ranked_decode: Engine
) -> None:
    """Blocks of the same number on the other rank hold something else: a leg to the wrong one shows in the tokens."""
    async with both(pair, decode=[f"{ranked_decode.url}#dp={RANKS}"]) as proxies:
        messages: dict[str, list[Json]] = {
            name: [user(f"# {name}\n" + STORY * length)] for name, length in (("fore", 1), ("aft", 2), ("port", 3))
        }

        async def turn(conversation: str, number: int) -> str:
            body: Json = {"messages": messages[conversation], "max_tokens": 24, "stream": number % 2 == 1}
            answered = await proxies.turn_as_expected(CHAT, body, conversation)
            messages[conversation] += [said(answered.on, CHAT), user(f"And the {number + 2}nd ship of {conversation}?")]
            return answered.outcome

        ranks: dict[str, str] = {}
        for conversation in messages:
            assert await turn(conversation, 0) == "first"
            worker = (await retained(proxies, conversation))["worker"]
            if worker not in ranks.values():
                ranks[conversation] = worker
            else:
                # A leg that failed at the ranks' first contact went to the other one, which this was meant for.
                await proxies.on.client.delete(f"/v1/conversations/{conversation}")
            if len(ranks) == RANKS:
                break
        assert sorted(ranks.values()) == [f"{ranked_decode.url}#rank={rank}" for rank in range(RANKS)]

        for number in range(1, 5):
            outcomes = await asyncio.gather(*(turn(conversation, number) for conversation in ranks))
            assert set(outcomes) <= {"hit", "partial"}
            for conversation, worker in ranks.items():
                assert (await retained(proxies, conversation))["worker"] == worker

        entries = [await retained(proxies, conversation) for conversation in ranks]
        expected = [entry["blocks"] for entry in sorted(entries, key=lambda entry: entry["worker"])]

        async def each_rank_holds_its_own_and_no_more() -> bool:
            return await held_by_rank(ranked_decode) == expected

        # Half a minute after the start, when the lease of what the proxies' probes asked has ended.
        await eventually(each_rank_holds_its_own_and_no_more, PATIENCE)
        # One of them ends: its rank alone gives back.
        ended = next(iter(ranks))
        assert (await proxies.on.client.delete(f"/v1/conversations/{ended}")).status_code == 200
        expected[sorted(ranks.values()).index(ranks[ended])] = 0
        await eventually(each_rank_holds_its_own_and_no_more, PATIENCE)

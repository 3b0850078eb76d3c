"""A store that is down or slow costs reuse, never a turn."""

from __future__ import annotations

import asyncio
import time

from tests.contract.answers import OPENING, chat, user
from tests.contract.conftest import MakeHouse
from tests.redis_server import RedisServer

ENGINES = {"kv_recompute_threshold": 16}


async def test_redis_stopped_in_a_conversation_and_started_again_fails_no_turn(
    make_house: MakeHouse, redis_server: RedisServer
) -> None:
    async with make_house(engines=ENGINES, store=redis_server.url, store_pause=0.0) as house:
        messages = [user(OPENING)]
        outcomes = []
        for turn in range(7):
            if turn == 2:
                redis_server.stop()
            if turn == 4:
                redis_server.start()
            said = await house.say(chat(messages, stream=turn % 2 == 0))
            outcomes.append(said.outcome)
            messages += [said.as_history, user(f"And {turn}?")]
        assert outcomes == ["first", "hit", "failed", "failed", "first", "hit", "hit"]
        assert await house.proxy.metric("turnback_store_failures_total") > 0
        assert await house.proxy.metric("turnback_turns_total", reason="store_unavailable") == 2
        assert not house.cluster.hazards


async def test_a_store_that_hangs_costs_its_timeout_once_and_not_every_turn(make_house: MakeHouse) -> None:
    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    async with server, make_house(engines=ENGINES, store=url, store_timeout=1.0, store_pause=3600.0) as house:
        begin = time.monotonic()
        for _ in range(10):
            said = await house.say(chat([user(OPENING)]))
            assert (said.outcome, said.reason) == ("failed", "store_unavailable")
        assert time.monotonic() - begin < 10, "one time-out of a second, not twenty"


async def test_two_proxies_share_conversations_through_redis(make_house: MakeHouse, redis_server: RedisServer) -> None:
    from tests.running import running

    async with (
        make_house(engines=ENGINES, store=redis_server.url) as house,
        running(house.proxy.settings, house.cluster.clock.now) as other,
    ):
        await other.probed()
        first = await house.say(chat([user(OPENING)]))
        house.proxy = other
        assert (await house.say(chat([user(OPENING), first.as_history, user("Go on.")]))).outcome == "hit"

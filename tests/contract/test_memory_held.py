"""Memory that decode keeps: for the newest turn of each conversation, within bounds, and never in a turn's way."""

from __future__ import annotations

import asyncio

from proxy.settings import Settings
from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse
from tests.running import eventually, running
from tests.simulator import Cluster, Recorded

ENGINES = {"kv_recompute_threshold": 16}


def story(number: int) -> list[Json]:
    return [user(f"Story number {number}. {OPENING}")]


async def test_a_full_decode_makes_no_new_conversation_wait(make_house: MakeHouse) -> None:
    """Retained blocks cannot be evicted: without release, the third conversation would wait for their TTL."""
    decode = {"num_blocks": 40, "prefix_caching": False}
    async with make_house(engines=ENGINES, decode=decode, retained_share=1.0, retained_watch_interval=3600) as house:
        for number in range(10):
            said = await asyncio.wait_for(house.say(chat(story(number)), f"c{number}"), 20)
            assert said.outcome == "first"
        assert await house.proxy.metric("turnback_releases_total", reason="pressure", result="released") > 0
        assert not house.cluster.hazards


async def test_what_others_leave_meanwhile_is_not_in_the_way_of_those_who_wait(make_house: MakeHouse) -> None:
    """All begin while there is room, and wait in decode's queue; those who end first retain blocks."""
    decode = {"num_blocks": 60, "prefix_caching": False}
    async with make_house(engines=ENGINES, decode=decode, retained_share=1.0, retained_watch_interval=3600) as house:
        both = asyncio.gather(*(house.say(chat(story(number)), f"c{number}") for number in range(16)))
        answers = await asyncio.wait_for(both, 30)
        assert {said.outcome for said in answers} == {"first"}
        assert not house.cluster.hazards


async def test_what_makes_room_are_the_oldest_entries(make_house: MakeHouse) -> None:
    decode = {"num_blocks": 60, "prefix_caching": False}
    async with make_house(engines=ENGINES, decode=decode, retained_share=1.0, retained_watch_interval=3600) as house:
        for number in range(6):
            await house.say(chat(story(number)), f"c{number}")
        await house.settled()
        assert (await house.say(chat(story(5)), "c5")).outcome == "partial", "the newest was kept"
        assert (await house.say(chat(story(0)), "c0")).outcome == "first", "the oldest was given up"


async def test_retained_blocks_are_kept_under_their_share(make_house: MakeHouse) -> None:
    decode = {"num_blocks": 100, "prefix_caching": False}
    async with make_house(engines=ENGINES, decode=decode, retained_share=0.2, retained_watch_interval=0.1) as house:
        for number in range(4):
            await house.say(chat(story(number)), f"c{number}")
        await eventually(lambda: sum(len(kept.blocks) for kept in house.decode.retained) <= 20)
        await eventually(lambda: _share_shown(house))


async def _share_shown(house: House) -> bool:
    return 0 < await house.proxy.metric("turnback_retained_share", worker=house.decode.url) <= 0.2


async def test_retained_tokens_are_kept_under_their_budget(make_house: MakeHouse) -> None:
    async with make_house(engines=ENGINES, retained_tokens_budget=150, retained_watch_interval=0.1) as house:
        for number in range(3):
            await house.say(chat(story(number)), f"c{number}")
        await eventually(lambda: sum(kept.num_tokens for kept in house.decode.retained) <= 150)
        assert await house.proxy.metric("turnback_releases_total", reason="budget", result="released") > 0


async def test_an_idle_conversation_gives_its_blocks_back(make_house: MakeHouse) -> None:
    async with make_house(engines=ENGINES, idle_release=100, retained_watch_interval=0.1) as house:
        await house.say(chat(story(1)))
        assert house.decode.retained
        house.cluster.clock.advance(101)
        await eventually(lambda: not house.decode.retained)
        assert await house.proxy.metric("turnback_releases_total", reason="idle", result="released") == 1


async def test_a_deleted_conversation_gives_its_blocks_back(house: House) -> None:
    await house.say(chat(story(1)), "over")
    found = (await house.proxy.client.get("/v1/conversations/over")).json()
    assert found["retained"][0]["turn"] == 1
    assert found["retained"][0]["tokens"] > 16
    other = await house.proxy.client.delete("/v1/conversations/over", headers={"authorization": "Bearer other"})
    assert other.status_code == 404, "another caller's conversation"
    deleted = await house.proxy.client.delete("/v1/conversations/over")
    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    await eventually(lambda: not house.decode.held())
    assert (await house.proxy.client.get("/v1/conversations/over")).status_code == 404
    assert (await house.proxy.client.delete("/v1/conversations/over")).status_code == 404
    assert (await house.say(chat(story(1)), "over")).outcome == "first"


async def test_a_router_that_ends_leaves_nothing_held_that_only_it_knew_of() -> None:
    """Its successor would find decode full of blocks that nobody can name, until their TTL."""
    async with Cluster() as cluster:
        prefill = await cluster.start("p", **ENGINES)
        decode = await cluster.start("d", **ENGINES)
        chosen = Settings(prefill=[prefill.url], decode=[decode.url], kv_recompute_threshold=16)  # type: ignore[list-item]
        async with running(chosen, cluster.clock.now) as proxy:
            await proxy.probed()
            for number in range(3):
                await proxy.post(CHAT, chat(story(number)), x_conversation_id=f"c{number}")
            assert len(decode.retained) == 3
        assert not decode.retained
        assert not cluster.hazards


async def test_a_conversation_id_that_is_too_long_is_refused(house: House) -> None:
    assert (await house.proxy.client.get("/v1/conversations/" + "x" * 257)).status_code == 400


def _reads_blocks(request: Recorded) -> bool:
    return request.is_prefill and bool(request.kv and request.kv.get("remote_block_ids")) and not request.is_release


async def test_a_client_that_leaves_during_a_reuse_leaves_nothing_held(make_house: MakeHouse) -> None:
    async with make_house(engines=ENGINES, abandon_grace=0.2) as house:
        first = await house.say(chat(story(1)))
        house.prefill.hang_next(when=_reads_blocks)
        body = chat([*story(1), first.as_history, user("Go on.")])
        asking = asyncio.create_task(house.proxy.post(CHAT, body, x_conversation_id="c"))
        await eventually(lambda: bool(house.prefill.busy))
        asking.cancel()
        await eventually(lambda: not house.decode.held())
        assert await house.proxy.metric("turnback_releases_total", reason="abandoned", result="released") == 1
        assert not house.cluster.hazards


async def test_a_client_that_leaves_between_prefill_and_decode_finds_its_prompt_computed(
    make_house: MakeHouse,
) -> None:
    """Room has to be made first, and that hangs; meanwhile the client goes. It comes again."""
    decode = {"num_blocks": 40, "prefix_caching": False}
    async with make_house(engines=ENGINES, decode=decode, retained_share=1.0, retained_watch_interval=3600) as house:
        for number in (1, 2):
            await house.say(chat(story(number)), f"c{number}")
        house.prefill.hang_next(when=lambda r: r.is_release)
        asking = asyncio.create_task(house.proxy.post(CHAT, chat(story(3)), x_conversation_id="c3"))
        await eventually(lambda: any(r.is_release for r in house.prefill.requests))
        assert house.prefill.leased, "the prompt is computed and waits for decode"
        asking.cancel()
        await eventually(lambda: any(r.is_decode and r.json["max_tokens"] == 1 for r in house.decode.requests))
        await eventually(lambda: house.remembers("c3"))
        said = await house.say(chat(story(3)), "c3")
        assert said.outcome == "partial"
        assert not house.cluster.hazards

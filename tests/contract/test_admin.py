"""Workers that an operator adds and drains by hand, while turns go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.contract.answers import CHAT, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse
from tests.running import eventually
from tests.simulator import Recorded, SimEngine

KEY = "open sesame"
WORKERS = "/admin/workers"
ENGINES = {"kv_recompute_threshold": 16}
SETTINGS = {"engines": ENGINES, "admin_key": KEY, "retained_watch_interval": 0.1}


async def admin(house: House, method: str, key: str | None = KEY, query: str = "", **body: object) -> httpx.Response:
    """A call to the endpoint; ``key`` None for none."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    client = house.proxy.client
    return await client.request(method, f"{WORKERS}?{query}", json=body or None, headers=headers)


async def pool(house: House) -> dict[str, Json]:
    """All workers, by name."""
    listed = await admin(house, "GET")
    assert listed.status_code == 200, listed.text
    return {worker["worker"]: worker for worker in listed.json()["workers"]}


def out_of_the_pool(house: House, name: str) -> Callable[[], Awaitable[bool]]:
    async def is_out() -> bool:
        return name not in await pool(house)

    return is_out


async def second_decode(house: House) -> SimEngine:
    """Another decode worker, added and up."""
    engine = await house.cluster.start("d2", **ENGINES)
    added = await admin(house, "POST", role="decode", url=engine.url)
    assert added.status_code == 201, added.text
    await house.proxy.probed()
    house.cluster.clock.advance(31)
    engine.requests.clear()
    return engine


async def come_and_gone(house: House, role: str) -> None:
    """Wait for as long as an idle worker takes to leave: those drained before would be out by then."""
    extra = await house.cluster.start("extra", **ENGINES)
    await admin(house, "POST", role=role, url=extra.url)
    await admin(house, "DELETE", role=role, url=extra.url)
    await eventually(out_of_the_pool(house, extra.url))


def opening(number: int) -> list[Json]:
    return [user(f"Story number {number}. {OPENING}")]


async def begun(house: House, number: int) -> list[Json]:
    """A conversation, begun; the messages of its next turn."""
    first = await house.say(chat(opening(number)), f"c{number}")
    return [*opening(number), first.as_history, user("Go on.")]


def answered_by(engine: SimEngine) -> list[Recorded]:
    return [request for request in engine.requests if request.is_decode]


async def test_a_drained_decode_gets_nothing_new_and_is_reused_from_until_it_leaves(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        going_on = {number: await begun(house, number) for number in (1, 2)}
        other = await second_decode(house)
        answered_before = len(answered_by(house.decode))
        assert answered_before == 2

        drained = await admin(house, "DELETE", role="decode", url=house.decode.url)
        assert drained.status_code == 202
        assert drained.json()["workers"][0]["draining"]
        assert drained.json()["workers"][0]["retained"]["conversations"] == 2
        for number in range(10, 14):
            assert (await house.say(chat(opening(number)), f"c{number}")).outcome == "first"
        assert len(answered_by(other)) == 4

        second = await house.say(chat(going_on[1]), "c1")
        assert second.outcome == "hit", "its blocks are there as long as it is"
        assert (await pool(house))[house.decode.url]["retained"]["conversations"] == 1
        assert (await house.say(chat(going_on[2]), "c2")).outcome == "hit"
        assert len(answered_by(other)) == 6
        assert len(answered_by(house.decode)) == answered_before

        await eventually(out_of_the_pool(house, house.decode.url))
        further = [*going_on[1], second.as_history, user("And then?")]
        assert (await house.say(chat(further), "c1")).outcome == "hit", "it moved to the other one"
        assert not house.cluster.hazards
        assert not house.decode.held()
        for metric in ("turnback_worker_up", "turnback_retained_entries"):
            text = (await house.proxy.client.get("/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith(metric)]
            assert not [line for line in lines if house.decode.url in line]


async def test_what_is_not_reused_expires_and_then_the_worker_leaves(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        await begun(house, 1)
        await second_decode(house)
        await admin(house, "DELETE", role="decode", url=house.decode.url)
        house.cluster.clock.advance(400)
        assert house.decode.url in await pool(house)
        house.cluster.clock.advance(80)
        await eventually(out_of_the_pool(house, house.decode.url))


async def test_drained_now_it_gives_back_what_it_retains(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        going_on = await begun(house, 1)
        await begun(house, 2)
        await second_decode(house)
        drained = await admin(house, "DELETE", query="now=true", role="decode", url=house.decode.url)
        assert drained.status_code == 202
        await eventually(lambda: not house.decode.held())
        assert await house.proxy.metric("turnback_releases_total", reason="drained", result="released") == 2
        await eventually(out_of_the_pool(house, house.decode.url))
        assert (await house.say(chat(going_on), "c1")).outcome == "first"
        assert not house.cluster.hazards


async def test_it_does_not_leave_while_a_turn_runs_on_it(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        house.decode.hang_next("after_headers", when=lambda request: request.is_decode)
        asking = asyncio.create_task(house.proxy.post(CHAT, chat(opening(1), stream=True), x_conversation_id="c1"))
        await eventually(lambda: bool(answered_by(house.decode)))
        await second_decode(house)
        await admin(house, "DELETE", query="now=true", role="decode", url=house.decode.url)
        await come_and_gone(house, "decode")
        assert (await pool(house))[house.decode.url]["in_flight"] == 1
        asking.cancel()
        await eventually(out_of_the_pool(house, house.decode.url))


async def test_it_does_not_leave_before_another_is_up(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        other = await house.cluster.start("d2", **ENGINES)
        await other.stop()
        await admin(house, "POST", role="decode", url=other.url)
        await admin(house, "DELETE", role="decode", url=house.decode.url)
        assert (await house.say(chat(opening(1)), "")).outcome == "none", "it serves until somebody else can"
        await come_and_gone(house, "prefill")
        assert house.decode.url in await pool(house)
        await other.start()
        await eventually(out_of_the_pool(house, house.decode.url))
        assert (await house.say(chat(opening(2)), "")).outcome == "none"


async def test_an_added_decode_takes_work_when_it_was_probed(make_house: MakeHouse) -> None:
    async with make_house(policy="round_robin", **SETTINGS) as house:
        other = await second_decode(house)
        for number in range(4):
            await house.say(chat(opening(number)), f"c{number}")
        assert len(answered_by(other)) == 2


async def test_an_added_prefill_takes_work_and_a_drained_one_none(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        other = await house.cluster.start("p2", **ENGINES)
        assert (await admin(house, "POST", role="prefill", url=other.url + "/")).status_code == 201
        await house.proxy.probed()
        house.cluster.clock.advance(31)
        assert (await admin(house, "DELETE", query=f"role=prefill&url={house.prefill.url}")).status_code == 202
        house.prefill.requests.clear()
        going_on = await begun(house, 1)
        assert (await house.say(chat(going_on), "c1")).outcome == "hit"
        assert not [request for request in house.prefill.requests if request.is_prefill]
        await eventually(out_of_the_pool(house, house.prefill.url))


async def test_a_turn_for_one_worker_alone_is_not_given_to_a_drained_one(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        await begun(house, 1)
        other = await second_decode(house)
        await admin(house, "DELETE", role="decode", url=house.decode.url)
        house.decode.requests.clear()
        for _ in range(3):
            response = await house.proxy.post(CHAT, chat(opening(1), n=2))
            assert response.status_code == 200
        assert [request.path for request in other.requests].count(CHAT) == 3
        assert [request.path for request in house.decode.requests].count(CHAT) == 0


async def test_a_drained_worker_is_taken_back(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        await begun(house, 1)
        await second_decode(house)
        await admin(house, "DELETE", role="decode", url=house.decode.url)
        back = await admin(house, "POST", role="decode", url=house.decode.url)
        assert back.status_code == 200
        assert not back.json()["workers"][0]["draining"]
        assert not (await pool(house))[house.decode.url]["draining"]


async def test_another_size_is_refused_while_it_is_there(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        refused = await admin(house, "POST", role="decode", url=house.decode.url, data_parallel_size=2)
        assert refused.status_code == 409
        assert [*await pool(house)] == [house.prefill.url, house.decode.url]


async def test_ranks_are_added_and_drained_together(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        other = await house.cluster.start("d2", **ENGINES)
        added = await admin(house, "POST", role="decode", url=other.url, data_parallel_size=2)
        assert [worker["rank"] for worker in added.json()["workers"]] == [0, 1]
        drained = await admin(house, "DELETE", role="decode", url=other.url)
        assert [worker["draining"] for worker in drained.json()["workers"]] == [True, True]
        await eventually(out_of_the_pool(house, f"{other.url}#rank=0"))
        await eventually(out_of_the_pool(house, f"{other.url}#rank=1"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_last_that_takes_work_stays(make_house: MakeHouse, role: str) -> None:
    async with make_house(**SETTINGS) as house:
        url = house.prefill.url if role == "prefill" else house.decode.url
        refused = await admin(house, "DELETE", role=role, url=url)
        assert refused.status_code == 409
        assert f"only {role} worker" in refused.json()["error"]["message"]
        assert not (await pool(house))[url]["draining"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "http://d:1"}, "role"),
        ({"role": "encode", "url": "http://d:1"}, "role"),
        ({"role": "decode"}, "url"),
        ({"role": "decode", "url": "d:1"}, "url"),
        ({"role": "decode", "url": "http://d:1", "data_parallel_size": 0}, "data_parallel_size"),
        ({"role": "decode", "url": "http://d:1", "rank": 0}, "rank"),
    ],
)
async def test_what_names_no_worker_is_refused_by_its_member(make_house: MakeHouse, body: Json, param: str) -> None:
    async with make_house(**SETTINGS) as house:
        refused = await admin(house, "POST", **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert refused.json()["error"]["param"] == param


async def test_a_body_that_is_no_object_is_refused(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        for content in (b"[]", b"{", b""):
            refused = await house.proxy.client.post(
                WORKERS, content=content, headers={"authorization": f"Bearer {KEY}"}
            )
            assert refused.status_code == 400


async def test_a_worker_that_is_not_there_cannot_be_drained(make_house: MakeHouse) -> None:
    async with make_house(**SETTINGS) as house:
        assert (await admin(house, "DELETE", role="decode", url="http://elsewhere:1")).status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_without_the_right_key_nothing_is_told_or_done(make_house: MakeHouse, method: str) -> None:
    async with make_house(**SETTINGS) as house:
        for key in (None, "wrong", KEY + "x", KEY[:-1]):
            refused = await admin(house, method, key, role="decode", url="http://d:1")
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        raw = b"Bearer \xff\xfe"
        refused = await house.proxy.client.request(method, WORKERS, headers={b"authorization": raw})
        assert refused.status_code == 401
        assert [*await pool(house)] == [house.prefill.url, house.decode.url]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_without_an_admin_key_there_is_no_such_endpoint(make_house: MakeHouse, method: str) -> None:
    async with make_house(engines=ENGINES) as house:
        for key in (None, KEY):
            refused = await admin(house, method, key, role="decode", url="http://d:1")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == 404


async def test_of_several_processes_none_is_changed_alone(make_house: MakeHouse) -> None:
    several = {**SETTINGS, "workers": 2, "store": "redis://127.0.0.1:1/0"}
    async with make_house(**several) as house:
        for method, url in (("POST", "http://d:1"), ("DELETE", house.decode.url)):
            refused = await admin(house, method, role="decode", url=url)
            assert refused.status_code == 409
            assert "config file" in refused.json()["error"]["message"]
        assert [*await pool(house)] == [house.prefill.url, house.decode.url]

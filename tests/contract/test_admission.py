"""So many turns at once and no more; the others wait, callers in turn, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import cast

import httpx
import openai
import pytest

from proxy.admission import Admission, decode_places
from proxy.errors import ApiError
from proxy.pool import Pool
from proxy.telemetry import Metrics
from router.workers import Role
from tests.contract.answers import CHAT, DONE, OPENING, chat, user
from tests.contract.conftest import House, Json, MakeHouse
from tests.running import GENEROUS, eventually

BODY = chat([user(OPENING)], stream=True)


@contextlib.asynccontextmanager
async def all_places_taken(house: House, places: int = 1) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Streams that go on until the block ends, and then to their ends."""
    gate = house.decode.pause_stream = asyncio.Event()
    turns = [asyncio.create_task(post(house, "holder")) for _ in range(places)]
    try:
        await eventually(lambda: len(decode_legs(house)) == places)
        yield turns
    finally:
        house.decode.pause_stream = None
        gate.set()
        await asyncio.gather(*turns, return_exceptions=True)


async def post(house: House, caller: str, body: Json = BODY) -> httpx.Response:
    return await house.proxy.client.post(CHAT, json=body, headers={"authorization": f"Bearer {caller}"})


def decode_legs(house: House) -> Sequence[object]:
    return [request for request in house.decode.requests if request.is_decode]


async def queued(house: House, number: int) -> None:
    async def so_many() -> bool:
        return await house.proxy.metric("turnback_turns_queued") == number

    await eventually(so_many)


def check_refusal(response: httpx.Response, status: int, kind: str) -> None:
    assert response.status_code == status
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert error["message"]


async def test_a_turn_waits_for_a_place_and_is_then_served(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1) as house:
        async with all_places_taken(house) as running:
            waiting = asyncio.create_task(post(house, "a"))
            await queued(house, 1)
            assert len(decode_legs(house)) == 1
            assert len(house.prefill.requests) == 1, "no worker hears of a turn that waits"
            assert await house.proxy.metric("turnback_turns_running") == 1
        for turn in (*running, waiting):
            assert (await turn).text.endswith(DONE)
        assert await house.proxy.metric("turnback_queue_seconds_count") == 1
        for gauge in ("turnback_turns_running", "turnback_turns_queued"):
            assert await house.proxy.metric(gauge) == 0


async def test_a_full_queue_is_429_before_any_worker_hears_of_it(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1, queue_size=0) as house:
        async with all_places_taken(house) as running:
            heard = len(house.prefill.requests) + len(house.decode.requests)
            check_refusal(await post(house, "a"), 429, "rate_limit_error")
            assert len(house.prefill.requests) + len(house.decode.requests) == heard
            assert await house.proxy.metric("turnback_turns_refused_total", reason="full") == 1
        assert (await running[0]).status_code == 200
        assert (await post(house, "a")).status_code == 200


async def test_the_official_client_comes_again_after_429(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1, queue_size=0) as house:
        async with all_places_taken(house):
            async with openai.AsyncOpenAI(base_url=f"{house.proxy.url}/v1", api_key="a", max_retries=0) as client:
                with pytest.raises(openai.RateLimitError):
                    await client.chat.completions.create(**chat([user(OPENING)]))
            patient = openai.AsyncOpenAI(base_url=f"{house.proxy.url}/v1", api_key="a", max_retries=2)
            asking = asyncio.create_task(patient.chat.completions.create(**chat([user(OPENING)])))

            async def refused_twice() -> bool:
                return await house.proxy.metric("turnback_turns_refused_total") == 2

            await eventually(refused_twice)
        async with patient:
            assert (await asking).choices[0].message.content


async def test_who_waits_too_long_gets_429(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1, queue_timeout=0.1) as house, all_places_taken(house):
        check_refusal(await post(house, "a"), 429, "rate_limit_error")
        assert await house.proxy.metric("turnback_turns_refused_total", reason="late") == 1
        assert await house.proxy.metric("turnback_turns_queued") == 0
        assert len(decode_legs(house)) == 1


async def test_one_caller_cannot_starve_another(make_house: MakeHouse) -> None:
    """Ten of one caller wait when another's first comes: it is served after one of them, not after ten."""
    async with make_house(max_turns_per_worker=1) as house:
        served: list[str] = []

        async def turn(caller: str) -> None:
            assert (await post(house, caller)).status_code == 200
            served.append(caller)

        async with all_places_taken(house):
            turns = []
            for number, caller in enumerate("aaaaaaaaaab", 1):
                turns.append(asyncio.create_task(turn(caller)))
                await queued(house, number)
        await asyncio.gather(*turns)
        assert served.index("b") <= 1, served


async def test_callers_without_a_credential_are_told_apart_by_address(make_house: MakeHouse) -> None:
    """As a trusted proxy in front tells it."""
    async with make_house(max_turns_per_worker=1, queue_size=2) as house, all_places_taken(house):

        async def turn(address: str) -> httpx.Response:
            return await house.proxy.client.post(CHAT, json=BODY, headers={"x-forwarded-for": address})

        crowd = [asyncio.create_task(turn("10.0.0.1")) for _ in range(2)]
        await queued(house, 2)
        other = asyncio.create_task(turn("10.0.0.2"))
        await eventually(lambda: any(task.done() for task in crowd))
        check_refusal(next(task for task in crowd if task.done()).result(), 429, "rate_limit_error")
        assert not other.done()
        await queued(house, 2)
        for task in (*crowd, other):
            task.cancel()
        await asyncio.gather(*crowd, other, return_exceptions=True)


async def test_a_client_that_hangs_up_leaves_the_queue_at_once(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1, queue_size=1) as house:
        async with all_places_taken(house):
            leaving = asyncio.create_task(post(house, "a"))
            await queued(house, 1)
            leaving.cancel()
            await queued(house, 0)
            staying = asyncio.create_task(post(house, "a"))
            await queued(house, 1)
        assert (await staying).status_code == 200
        assert len(decode_legs(house)) == 2


async def test_a_client_that_hangs_up_while_served_gives_its_place_back(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1, queue_timeout=GENEROUS) as house:
        async with all_places_taken(house) as running:
            waiting = asyncio.create_task(post(house, "a"))
            await queued(house, 1)
            running[0].cancel()
            await queued(house, 0)
            await eventually(lambda: len(decode_legs(house)) == 2)
        assert (await waiting).status_code == 200


async def test_a_worker_that_comes_up_brings_places() -> None:
    """Nobody's turn ended, and yet there is room."""
    places = 1
    admission = Admission(lambda: places, 9, GENEROUS, Metrics())
    async with place(admission, "a"):
        waiting = asyncio.create_task(pass_through(admission))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        places = 2
        await asyncio.wait_for(waiting, GENEROUS)


async def test_a_place_given_to_one_who_leaves_at_that_moment_is_not_lost() -> None:
    admission = Admission(lambda: 1, 9, GENEROUS, Metrics())
    async with place(admission, "a"):
        leaving = asyncio.create_task(pass_through(admission))
        staying = asyncio.create_task(pass_through(admission))
        await asyncio.sleep(0)
    # It has been told that it may run, and has not run yet.
    leaving.cancel()
    await asyncio.wait_for(staying, GENEROUS)
    assert leaving.cancelled()
    await asyncio.wait_for(pass_through(admission), GENEROUS)


async def test_who_waits_when_the_process_is_to_end_is_refused_at_once() -> None:
    admission = Admission(lambda: 1, 9, GENEROUS, Metrics())
    async with place(admission, "a"):
        waiting = asyncio.create_task(pass_through(admission))
        await asyncio.sleep(0)
        admission.close()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        with pytest.raises(ApiError, match="shutting down"):
            await pass_through(admission)


@contextlib.asynccontextmanager
async def place(admission: Admission, caller: str) -> AsyncIterator[None]:
    await admission.enter(caller)
    try:
        yield
    finally:
        admission.leave()


async def pass_through(admission: Admission) -> None:
    async with place(admission, "b"):
        pass


def test_places_are_those_of_the_decode_workers_that_are_up() -> None:
    workers = [SimpleNamespace(up=False, draining=False), SimpleNamespace(up=False, draining=False)]
    pool = cast(Pool, SimpleNamespace(all=lambda role: workers if role is Role.DECODE else []))
    assert decode_places(pool, 0)() == float("inf")
    places = decode_places(pool, 10)
    assert places() == 20, "none is known to be up, and all are tried"
    workers[0].up = True
    assert places() == 10


async def test_without_a_bound_nobody_waits(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=0, queue_size=0) as house, all_places_taken(house, 40) as running:
        assert await house.proxy.metric("turnback_turns_running") == len(running)


async def test_a_bad_request_is_told_at_once(make_house: MakeHouse) -> None:
    async with make_house(max_turns_per_worker=1, queue_size=0) as house, all_places_taken(house):
        response = await house.proxy.client.post(CHAT, content=b"{")
        assert response.status_code == 400
        assert "retry-after" not in response.headers


async def test_a_turn_that_no_worker_serves_is_503_with_a_time_to_come_again(make_house: MakeHouse) -> None:
    async with make_house(connect_timeout=1) as house:
        for engine in house.engines:
            await engine.stop()
        check_refusal(await post(house, "a"), 503, "service_unavailable_error")


async def test_a_turn_that_takes_too_long_before_it_begins_is_504(make_house: MakeHouse) -> None:
    async with make_house(turn_timeout=0.3) as house:
        house.decode.hang_next("before_headers", when=lambda request: request.is_decode)
        response = await post(house, "a")
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        assert "turn_timeout" in response.json()["error"]["message"]
        await eventually(lambda: decode_aborted(house))
        assert await house.proxy.metric("turnback_turns_running") == 0


async def test_a_turn_that_takes_too_long_after_it_began_ends_with_an_error_and_no_end_mark(
    make_house: MakeHouse,
) -> None:
    async with make_house(turn_timeout=0.5) as house:
        house.decode.hang_next("mid_stream", events=4, when=lambda request: request.is_decode)
        response = await post(house, "a")
        assert response.status_code == 200
        assert "[DONE]" not in response.text
        events = response.text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == 504
        assert all("choices" in event for event in events[:-1])
        assert len(events) > 2
        await eventually(lambda: decode_aborted(house))
        assert await house.proxy.metric("turnback_turns_running") == 0


def decode_aborted(house: House) -> bool:
    return any(request.is_decode and request.aborted for request in house.decode.requests)

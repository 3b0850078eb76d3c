"""A turn's trace: what is in it, what workers are told of it, and that no turn depends on it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator

import pytest

from deploy.local.ports import free_port
from tests.collector import Collector, Span
from tests.contract.answers import CHAT, DONE, OPENING, chat, user
from tests.contract.conftest import House, MakeHouse
from tests.running import eventually
from tests.simulator import Recorded

ENGINES = {"kv_recompute_threshold": 16}
NAME = f"POST {CHAT}"
CLIENTS = "00-" + "a1" * 16 + "-" + "b2" * 8
SECRETS = ("hush-conversation", "hush-key", "hush-request", "hush-prompt", "hush-worker-key", "hush-state")


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """What it gets, it gets soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with Collector() as listening:
        yield listening


@pytest.fixture
async def traced(collector: Collector, make_house: MakeHouse) -> AsyncIterator[House]:
    """The usual house, its turns traced."""
    async with make_house(engines=ENGINES, otlp_endpoint=collector.url) as house:
        yield house


def is_of(request: Recorded, span: Span) -> bool:
    """Whether a worker was told that ``request`` belongs to ``span``."""
    return request.headers.get("traceparent", "").startswith(span.traceparent)


async def test_a_conversations_two_turns(traced: House, collector: Collector) -> None:
    first = await traced.say(chat([user(OPENING)]), "one")
    one = await collector.turn(0)
    take, prefill, decode, put = await one.has("store take", "prefill", "decode", "store put")
    assert (one.root.name, one.root.parent, one.root.error) == (NAME, "", None)
    tokens = one.root.attributes["prompt_tokens"]
    assert one.root.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "outcome": "first",
        "reason": "nothing_retained",
        "turn": 1,
        "conversation": one.root.attributes["conversation"],
        "prompt_tokens": tokens,
        "reused_tokens": 0,
    }
    assert re.fullmatch("[0-9a-f]{12}", one.root.attributes["conversation"])
    assert prefill.attributes == {"worker": traced.prefill.url, "reused_tokens": 0, "prompt_tokens": tokens}
    assert decode.attributes == {
        "worker": traced.decode.url,
        "role": "decode",
        "http.response.status_code": 200,
        "output_tokens": 24,
    }
    assert {span.kind for span in (take, prefill, decode, put)} == {"CLIENT"}

    await traced.say(chat([user(OPENING), first.as_history, user("Go on.")], stream=True), "one")
    two = await collector.turn(1)
    take, render, prefill, decode, put = await two.has("store take", "render", "prefill", "decode", "store put")
    assert two.root.trace != one.root.trace
    assert two.root.attributes["conversation"] == one.root.attributes["conversation"]
    assert (two.root.attributes["outcome"], two.root.attributes["turn"]) == ("hit", 2)
    assert prefill.attributes["reused_tokens"] == two.root.attributes["reused_tokens"] > 0
    assert render.attributes["prompt_tokens"] == two.root.attributes["prompt_tokens"]
    assert decode.events == ["first token"]
    assert two.root.begin <= take.begin <= take.end <= render.begin <= render.end <= prefill.begin <= prefill.end
    assert prefill.end <= decode.begin <= put.begin <= put.end <= decode.end <= two.root.end
    assert not [span for span in two if span.error is not None]

    # Each request names the span that it is part of; what is no part of a turn names none.
    rendered, prefilled = traced.prefill.requests[-2:]
    assert is_of(rendered, render)
    assert is_of(prefilled, prefill)
    assert is_of(traced.decode.requests[-1], decode)
    assert traced.prefill.probes
    assert not [probe for engine in traced.engines for probe in engine.probes if "traceparent" in probe.headers]
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "turnback"


async def test_the_clients_trace_goes_on(traced: House, collector: Collector) -> None:
    headers = {"traceparent": f"{CLIENTS}-01", "tracestate": "vendor=value"}
    await traced.proxy.client.post(CHAT, json=chat([user(OPENING)]), headers=headers)
    turn = await collector.turn()
    assert (turn.root.trace, turn.root.parent, turn.root.state) == ("a1" * 16, "b2" * 8, "vendor=value")
    # Of a turn without a conversation's name nothing is kept.
    prefill, decode, _ = await turn.has("prefill", "decode", "release")
    (prefilled, _), (decoded,) = traced.prefill.requests, traced.decode.requests
    assert is_of(prefilled, prefill)
    assert is_of(decoded, decode)
    assert decoded.headers["tracestate"] == "vendor=value"


async def test_a_client_may_decide_that_its_turn_is_not_traced(traced: House, collector: Collector) -> None:
    await traced.proxy.client.post(CHAT, json=chat([user(OPENING)]), headers={"traceparent": f"{CLIENTS}-00"})
    for engine in traced.engines:
        told = engine.requests[0].headers["traceparent"]
        assert told.startswith(CLIENTS[:35])
        assert told.endswith("-00")
    await traced.say(chat([user(OPENING)]))
    assert (await collector.turn()).root.trace != "a1" * 16
    assert {span.trace for span in collector.spans} == {collector.spans[0].trace}


async def test_a_share_of_turns(make_house: MakeHouse, collector: Collector) -> None:
    async with make_house(engines=ENGINES, otlp_endpoint=collector.url, trace_sample_ratio=0.0) as house:
        await house.say(chat([user(OPENING)]))
        headers = {"traceparent": f"{CLIENTS}-01"}
        await house.proxy.client.post(CHAT, json=chat([user(OPENING)]), headers=headers)
        assert (await collector.turn()).root.trace == "a1" * 16


async def test_nothing_of_a_clients_is_in_it(make_house: MakeHouse, collector: Collector) -> None:
    async with make_house(engines=ENGINES, otlp_endpoint=collector.url, worker_api_key="hush-worker-key") as house:
        headers = {
            "x-conversation-id": "hush-conversation",
            "authorization": "Bearer hush-key",
            "x-request-id": "hush-request",
            "traceparent": "hush-request",
            "tracestate": "hush-state=1",
        }
        body = chat([user(f"hush-prompt {OPENING}")])
        answer = (await house.proxy.client.post(CHAT, json=body, headers=headers)).json()["choices"][0]["message"]
        house.prefill.fail_next(body={"error": {"message": "hush-prompt"}}, when=lambda r: r.is_prefill)
        body["messages"] += [answer, user("hush-prompt again")]
        await house.proxy.client.post(CHAT, json=body, headers=headers)
        await house.proxy.client.post(CHAT, json=body | {"temperature": "hush-prompt"}, headers=headers)
        await collector.turn(2)
    received = b"".join(collector.received)
    assert b"outcome" in received
    for secret in (*SECRETS, answer["content"]):
        assert secret.encode() not in received
    assert not [request for engine in house.engines for request in engine.requests if "tracestate" in request.headers]


async def test_what_failed_says_so(traced: House, collector: Collector) -> None:
    first = await traced.say(chat([user(OPENING)]))
    await collector.turn(0)
    traced.prefill.fail_next(status=500, when=lambda r: r.is_prefill)
    await traced.say(chat([user(OPENING), first.as_history, user("Go on.")]))
    turn = await collector.turn(1)
    names = ("store take", "render", "prefill", "prefill", "decode", "store put")
    _, _, reusing, plain, _, _ = await turn.has(*names)
    assert (turn.root.error, turn.root.attributes["outcome"]) == (None, "failed")
    assert (reusing.error, reusing.attributes["http.response.status_code"]) == ("status 500", 500)
    assert reusing.attributes["reused_tokens"] > 0
    assert (plain.error, plain.attributes["reused_tokens"]) == (None, 0)


async def test_a_turn_that_nobody_serves(traced: House, collector: Collector) -> None:
    for engine in traced.engines:
        engine.fail_next(status=500, when=lambda r: r.method == "POST", times=99)
    assert (await traced.proxy.post(CHAT, chat([user(OPENING)]))).status_code == 503
    turn = await collector.turn()
    assert turn.root.error == "status 503"
    legs = await turn.has("prefill", "prefill", "decode", "decode")
    assert [leg.error for leg in legs] == ["status 500"] * 4
    assert [leg.attributes.get("role") for leg in legs][2:] == ["decode", "prefill"]


async def test_a_refused_request(traced: House, collector: Collector) -> None:
    assert (await traced.proxy.post(CHAT, chat([user(OPENING)], temperature=-5))).status_code == 400
    assert (await traced.proxy.post(CHAT, "no object")).status_code == 400
    turn = await collector.turn(0)
    (prefill,) = await turn.has("prefill")
    assert (prefill.error, turn.root.error) == ("status 400", None)
    assert turn.root.attributes["http.response.status_code"] == 400
    await (await collector.turn(1)).has()


async def test_a_stream_that_breaks_off(traced: House, collector: Collector) -> None:
    traced.decode.close_next("mid_stream", events=4, when=lambda r: r.is_decode)
    assert DONE not in (await traced.proxy.post(CHAT, chat([user(OPENING)], stream=True))).text
    traced.decode.error_next(events=4, when=lambda r: r.is_decode)
    await traced.proxy.post(CHAT, chat([user(OPENING)], stream=True))
    for number, error in enumerate(("the stream broke off", "the worker ended it with an error")):
        turn = await collector.turn(number)
        _, decode = await turn.has("prefill", "decode")
        assert (decode.error, turn.root.error) == (error, error)
        assert turn.root.attributes["http.response.status_code"] == 200


async def test_a_client_that_hangs_up_ends_its_spans(traced: House, collector: Collector) -> None:
    traced.decode.hang_next("mid_stream", events=4, when=lambda r: r.is_decode)
    body = chat([user(OPENING)], stream=True)
    async with traced.proxy.client.stream("POST", CHAT, json=body, headers={"x-conversation-id": "c"}) as response:
        async for _ in response.aiter_text():
            break
    turn = await collector.turn()
    _, _, decode = await turn.has("store take", "prefill", "decode")
    assert (turn.root.attributes["http.response.status_code"], turn.root.attributes["cancelled"]) == (499, True)
    assert decode.attributes["cancelled"] is True
    assert (decode.error, turn.root.error) == (None, None)
    assert decode.end <= turn.root.end


async def test_what_is_done_after_a_turn_is_part_of_its_trace(traced: House, collector: Collector) -> None:
    """Prefill had ended when the client left: decode is told to take the blocks over, and what that leaves is kept."""
    traced.prefill.hang_next("after_headers", when=lambda r: r.is_prefill)
    asking = asyncio.create_task(traced.say(chat([user(OPENING)])))
    await eventually(lambda: traced.prefill.requests and traced.prefill.requests[0].request_ids)
    asking.cancel()
    turn = await collector.turn(0)
    _, prefill = await turn.has("store take", "prefill")
    assert prefill.attributes["cancelled"] is True

    await traced.say(chat([user(OPENING)]))
    await traced.say(chat([user(f"Another one. {OPENING}")]))
    turn = await collector.turn(2)
    names = ("store take", "render", "release", "prefill", "decode", "store put")
    release = next(span for span in await turn.has(*names) if span.name == "release")
    assert release.attributes == {"worker": traced.decode.url, "why": "diverged"}
    assert is_of(next(r for r in traced.prefill.requests if r.is_release), release)


async def test_a_place_in_the_queue(make_house: MakeHouse, collector: Collector) -> None:
    async with make_house(max_turns_per_worker=1, queue_timeout=0.2, otlp_endpoint=collector.url) as house:
        gate = house.decode.pause_stream = asyncio.Event()
        running = asyncio.create_task(house.proxy.post(CHAT, chat([user(OPENING)], stream=True)))
        await eventually(lambda: house.decode.requests)
        assert (await house.proxy.post(CHAT, chat([user(OPENING)]))).status_code == 429
        house.decode.pause_stream = None
        gate.set()
        await running
        turn = await collector.turn(0)
        (queue,) = await turn.has("queue")
        assert (queue.error, turn.root.error, turn.root.attributes["http.response.status_code"]) == ("late", None, 429)


async def test_a_store_that_is_down(make_house: MakeHouse, collector: Collector) -> None:
    store = f"redis://127.0.0.1:{free_port()}/0"
    async with make_house(engines=ENGINES, otlp_endpoint=collector.url, store=store) as house:
        await house.say(chat([user(OPENING)]))
        turn = await collector.turn()
        take, *_ = await turn.has("store take", "prefill", "decode", "release")
        assert take.error
        assert turn.root.error is None


async def test_turns_at_once_have_their_own_traces(traced: House, collector: Collector) -> None:
    await asyncio.gather(*(traced.say(chat([user(f"{n}. {OPENING}")]), f"c{n}") for n in range(8)))
    for number in range(8):
        await (await collector.turn(number)).has("store take", "prefill", "decode", "store put")


async def test_the_turns_line_in_the_log_names_its_trace(
    make_house: MakeHouse, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    async with make_house(otlp_endpoint=collector.url, log_level="info", log_format="json") as house:
        await house.say(chat([user(OPENING)]))
        turn = await collector.turn()
        logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [line["trace_id"] for line in logged if line["event"] == "turn"] == [turn.root.trace]


async def test_off_workers_get_the_clients_own(house: House) -> None:
    first = await house.say(chat([user(OPENING)]))
    for request in (*house.prefill.requests, *house.decode.requests):
        assert not {"traceparent", "tracestate"} & {name.lower() for name in request.headers}
    second = chat([user(OPENING), first.as_history, user("Go on.")])
    for headers in (
        {"traceparent": f"{CLIENTS}-01", "tracestate": "vendor=value"},
        {"traceparent": f"{CLIENTS}-00"},
        {"traceparent": "not-a-trace", "tracestate": "vendor=value"},
        {"tracestate": "vendor=value"},
    ):
        for engine in house.engines:
            engine.requests.clear()
        await house.proxy.client.post(CHAT, json=second, headers=headers | {"x-conversation-id": "c"})
        expected = headers if headers.get("traceparent", "").startswith("00-") else {}
        legs = [r for engine in house.engines for r in engine.requests if not r.is_release]
        assert len(legs) == 3
        for leg in legs:
            names = ("traceparent", "tracestate")
            assert {name: leg.headers[name] for name in names if name in leg.headers} == expected


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "is wrong"])
async def test_a_collector_in_trouble_is_no_trouble_for_turns(
    trouble: str, collector: Collector, make_house: MakeHouse, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    collector.status = 400
    hanging = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    port = hanging.sockets[0].getsockname()[1] if trouble == "hangs" else free_port()
    url = collector.url if trouble == "is wrong" else f"http://127.0.0.1:{port}"
    async with hanging:
        async with make_house(engines=ENGINES, otlp_endpoint=url) as house:
            began = time.monotonic()
            messages = [user(OPENING)]
            for number in range(6):
                said = await house.say(chat(messages, stream=number % 2 == 0))
                assert said.outcome == ("hit" if number else "first")
                messages += [said.as_history, user(f"And {number}?")]
            assert time.monotonic() - began < 5
            if trouble == "is wrong":
                await eventually(lambda: len(collector.paths) > 2)
            leaving = time.monotonic()
        assert time.monotonic() - leaving < 5
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line or "rror" in line]
    assert "the trace collector does not take spans" in told


async def test_a_collector_that_is_back_is_told_once(
    collector: Collector, make_house: MakeHouse, capsys: pytest.CaptureFixture[str]
) -> None:
    async with make_house(engines=ENGINES, otlp_endpoint=collector.url, log_level="info") as house:
        collector.status = 400
        await house.say(chat([user(OPENING)]))
        await eventually(lambda: collector.paths)
        collector.status = 200
        await house.say(chat([user(OPENING)]))
        await collector.turn()
        seen = ""
        while "takes spans again" not in seen:
            await asyncio.sleep(0.01)
            seen += capsys.readouterr().err
        assert seen.count("does not take spans") == 1


async def test_what_is_left_at_the_end_is_sent(make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    async with Collector() as collector:
        async with make_house(engines=ENGINES, otlp_endpoint=collector.url) as house:
            await house.say(chat([user(OPENING)]))
            assert not collector.spans
        assert (await collector.turn()).root.name == NAME

"""The quick way with a chunk gives what the full reading gives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.background import Background
from proxy.errors import broken_off
from proxy.harvest import Harvest
from proxy.interruption import Interruption
from proxy.relay import Relay, names_role_only
from proxy.sse import Events, data_of, is_end, with_data
from proxy.usual_chunk import UsualChunks, is_opening, without_prompt
from proxy.worker_stream import Stream
from tests.running import GENEROUS


def carried(event: bytes) -> Any:
    assert event.endswith(b"\n\n")
    return json.loads(data_of(event))


texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            '","token_ids":[1]', ',"token_ids":[7,8]', '\\","token_ids":[1],"', '"finish_reason":null', "token_ids",
            ',"kv_transfer_params":null', '"delta":{}', '"error"', "]", "[1", "data: [DONE]", "\\", '\\"',
        ]
    ),
)  # fmt: skip


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    delta = draw(st.dictionaries(st.sampled_from(["content", "reasoning", "role"]), texts, max_size=2))
    choice: dict[str, Any] = {"index": 0}
    if draw(st.booleans()):
        choice["delta"] = delta
    else:
        choice["text"] = draw(texts)
    choice["logprobs"] = draw(st.sampled_from([None, None, {"content": [{"token": draw(texts)}]}]))
    choice["finish_reason"] = draw(st.sampled_from([None, None, None, "stop"]))
    for name in ("token_ids", "prompt_token_ids"):
        told: Any = draw(st.sampled_from([..., None, [], "list"]))
        if told is not ...:
            choice[name] = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=3)) if told == "list" else told
    top: dict[str, Any] = {"id": draw(texts), "choices": [choice]}
    for name in ("prompt_token_ids", "kv_transfer_params"):
        if draw(st.integers(0, 4)) == 0:
            top[name] = draw(st.sampled_from([None, [1, 2], {"a": 1}]))
    order = draw(st.permutations(list(top)))
    spaced = draw(st.integers(0, 9)) == 0
    return json.dumps({name: top[name] for name in order}, separators=None if spaced else (",", ":")).encode()


def framed(chunk: bytes) -> bytes:
    return b"data: " + chunk + b"\n\n"


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def usual_chunks(draw: st.DrawFn) -> bytes:
    """As vLLM writes them, or nearly so."""
    if draw(st.booleans()):
        choice: dict[str, Any] = {"index": 0, "text": draw(texts), "logprobs": None, "finish_reason": None}
        choice |= {"stop_reason": None, "prompt_token_ids": None}
    else:
        told = draw(texts)
        calls = [{"index": draw(st.integers(0, 12)), "function": {"arguments": told}}]
        delta = draw(some({"content": told}, {"reasoning": told}, {"tool_calls": calls}))
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    choice["token_ids"] = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=3))
    usage = draw(some({}, {}, {"usage": None}, {"usage": {"prompt_tokens": 5}}))
    params = draw(some({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"a": 1}}))
    other = draw(some({}, {}, {}, {"error": None}, {"error": "x"}, {"prompt_token_ids": [3]}))
    first = draw(some(other, {}))
    top = {
        "id": "c",
        "object": "o",
        "created": 1,
        **first,
        "model": "m",
        "choices": [choice],
        **usage,
        **params,
        **other,
    }
    return json.dumps(top, separators=(",", ":"), ensure_ascii=draw(st.booleans())).encode()


@st.composite
def openings(draw: st.DrawFn) -> bytes:
    delta = {"role": "assistant", "content": draw(some("", "", "", "a"))}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    ids = draw(some([1, 2, 3], [1, 2, 3], [], None, [[4], 5], ["a]"], "text", {"a": [1]}, [1.5]))
    before = draw(some({}, {}, {"kv_transfer_params": None}, {"error": "x"}))
    after = draw(some({"prompt_text": None}, {"prompt_text": None}, {}, {"more": [1]}, {"error": "x"}))
    top = {"id": "c", **before, "model": draw(texts), "choices": [choice], "prompt_token_ids": ids, **after}
    return json.dumps(top, separators=(",", ":")).encode()


events = st.one_of(
    usual_chunks().map(framed),
    usual_chunks().map(framed),
    chunks().map(framed),
    openings().map(framed),
    st.sampled_from(
        [
            b"data: [DONE]\n\n", b": ping\n\n", b"\n\n", b"\n: ping\n\n", b"event: x\ndata: {}\n\n", b"data: {\n\n",
            b'data: {"choices":[]}\n\n', b'data: {"error":{"code":500}}\n\n', b"data: 1\ndata: 2\n\n",
        ]
    ),
)  # fmt: skip


async def relayed(reads: Iterable[bytes], harvest: Harvest) -> bytes:
    left = iter(reads)

    async def read() -> bytes:
        return next(left, b"")

    async def finish() -> None:
        return None

    source = cast(Stream, SimpleNamespace(leave=lambda: None))
    relay = Relay(source, Events(read), harvest, finish, Interruption(GENEROUS), Background())
    told = b""
    while not relay.over:
        told += await relay.next()
    return told


def read_in_full(stream: Sequence[bytes], harvest: Harvest) -> bytes:
    """What a client gets where each event's JSON is read."""
    told: list[bytes] = []
    for event in stream:
        if is_end(event):
            return b"".join([*told, event])
        data = data_of(event)
        kept = harvest.take(data) if data else data
        if kept is data:
            told.append(event)
        elif kept is not None:
            told.append(with_data(event, kept))
    harvest.failed = True
    return b"".join([*told, broken_off("the worker closed the stream before its end").event()])


def learned(harvest: Harvest) -> dict[str, Any]:
    names = ("generated", "finished", "failed", "complete", "tokens", "prompt_tokens")
    params = None if harvest.params is None else bytes(harvest.params)
    ids = None if harvest.prompt_ids is None else bytes(harvest.prompt_ids.json)
    return {name: getattr(harvest, name) for name in names} | {"params": params, "prompt_ids": ids}


def shown(told: bytes) -> list[Any]:
    """Spaces between members are not kept in the same way."""
    return [read_if_json(event) for event in told.split(b"\n\n")]


def read_if_json(event: bytes) -> Any:
    try:
        return json.loads(data_of(event))
    except ValueError:
        return event


def cut(wire: bytes, places: Iterable[int]) -> list[bytes]:
    return [wire[begin:end] for begin, end in pairwise(sorted({0, len(wire), *(p % (len(wire) + 1) for p in places)}))]


@given(st.lists(events, max_size=6), st.lists(st.integers(0, 10_000), max_size=4), st.booleans())
async def test_the_same_is_learned_and_shown(stream: list[bytes], places: list[int], wants: bool) -> None:
    in_full, one_by_one, in_reads = (Harvest(client_wants_ids=wants) for _ in range(3))
    expected = read_in_full(stream, in_full)
    told = await relayed(stream, one_by_one)
    assert shown(told) == shown(expected)
    assert b'": ' in b"".join(stream) or told == expected
    assert learned(one_by_one) == learned(in_full)
    assert await relayed(cut(b"".join(stream), places), in_reads) == told, "however they arrive"
    assert learned(in_reads) == learned(in_full)


@given(openings())
def test_an_opening_that_is_told_quickly_is_one(chunk: bytes) -> None:
    whole = json.loads(chunk)
    says_nothing = whole["choices"][0]["delta"]["content"] == ""
    assert names_role_only(framed(chunk)) == says_nothing
    assert says_nothing or not is_opening(framed(chunk))


def test_the_usual_opening_goes_the_quick_way() -> None:
    choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    before = b'data: {"id":"c","object":"o","created":1,"model":"m","choices":[' + choice + b"]"
    event = before + b',"prompt_token_ids":[1,2],"prompt_text":null}\n\n'
    assert without_prompt(event) == (before + b',"prompt_text":null}\n\n', msgspec.Raw(b"[1,2]"))


def quick(event: bytes) -> tuple[bytes | None, list[int]]:
    ids: list[int] = []
    [(same, usual)] = UsualChunks().without_ids(event, ids)
    assert same == event
    return usual, ids


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[{"delta":{"content":"a"},"finish_reason":null,"token_ids":[7]}]}',
        b'{"choices":[{"text":"a","finish_reason":null,"prompt_token_ids":null,"token_ids":[7]}],"kv_transfer_params":null}',
    ],
)
def test_the_usual_chunks_of_engines_go_the_quick_way(chunk: bytes) -> None:
    usual, ids = quick(framed(chunk))
    assert usual is not None
    assert ids == [7]
    assert b"ids" not in usual
    assert b"kv_transfer_params" not in usual


def test_a_second_choice_does_not_go_the_quick_way() -> None:
    """Its ids would go with it."""
    choices = [
        {"index": index, "text": "a", "finish_reason": finish, "token_ids": [7]}
        for index, finish in enumerate([None, "stop"])
    ]
    chunk = json.dumps({"choices": choices}, separators=(",", ":")).encode()
    assert quick(framed(chunk)) == (None, [])


async def test_text_that_looks_like_a_member_stays_text() -> None:
    text = ',"token_ids":[1],"finish_reason":null'
    choice = {"delta": {"content": text}, "finish_reason": None, "token_ids": [5]}
    chunk = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    harvest = Harvest(client_wants_ids=False)
    told = await relayed([framed(chunk) + b"data: [DONE]\n\n"], harvest)
    assert carried(told.removesuffix(b"data: [DONE]\n\n"))["choices"][0]["delta"]["content"] == text
    assert harvest.generated == [5]

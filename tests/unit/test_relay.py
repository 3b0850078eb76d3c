"""Decode's stream on its way out: the same events, however they arrive, and never a false end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.background import Background
from proxy.harvest import Harvest
from proxy.interruption import Interruption
from proxy.relay import Finish, Relay
from proxy.sse import Events, each
from proxy.worker_stream import BrokenOff, Stream
from tests.running import GENEROUS
from tests.unit.test_harvest import CHAT_STREAM, PARAMS, TEXT_STREAM, chat_chunk, without

DONE = b"data: [DONE]\n\n"


class Parts:
    """A stream that arrives in ``parts``, and then ends, or breaks off."""

    def __init__(self, parts: Iterable[bytes], broken: str | None = None) -> None:
        self._parts = list(parts)
        self._broken = broken
        self.became: list[str] = []

    def leave(self) -> None:
        self.became.append("left")

    def close(self) -> None:
        self.became.append("closed")

    async def next(self) -> bytes:
        if self._parts:
            return self._parts.pop(0)
        if self._broken is not None:
            raise BrokenOff(self._broken)
        return b""

    def unread(self) -> bytes:
        unread, self._parts = b"".join(self._parts), []
        return unread


def stream(parts: Iterable[bytes], broken: str | None = None) -> Stream:
    return cast(Stream, Parts(parts, broken))


async def cut(parts: Iterable[bytes]) -> list[bytes]:
    events = Events(stream(parts).next)
    found: list[bytes] = []
    while arrived := await events.arrived():
        found += each(arrived)
    return found


def relay_of(source: Stream, harvest: Harvest, finish: Finish) -> Relay:
    return Relay(source, Events(source.next), harvest, finish, Interruption(GENEROUS), Background())


async def relayed(
    parts: Iterable[bytes], broken: str | None = None, *, wants: bool = False
) -> tuple[list[bytes], Harvest, list[int]]:
    """What the client got, what was learned, and after how many events it was remembered."""
    harvest = Harvest(client_wants_ids=wants)
    got: list[bytes] = []
    remembered: list[int] = []

    async def finish() -> None:
        remembered.append(len(got))

    relay = relay_of(stream(parts, broken), harvest, finish)
    while not relay.over:
        # One by one, since ``finish`` looks at how many there were.
        got += each(await relay.next())
    return got, harvest, remembered


def framed(chunks: Iterable[bytes]) -> list[bytes]:
    return [b"data: " + chunk + b"\n\n" for chunk in chunks]


WIRE = b"".join([*framed(CHAT_STREAM), DONE])


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(WIRE)), max_size=12), st.booleans())
async def test_events_are_the_same_wherever_the_reads_are_cut(places: list[int], crlf: bool) -> None:
    wire = WIRE.replace(b"\n", b"\r\n") if crlf else WIRE
    edges = sorted({0, len(wire), *(place * len(wire) // len(WIRE) for place in places)})
    parts = [wire[start:end] for start, end in pairwise(edges)]
    assert await cut(parts) == [*framed(CHAT_STREAM), DONE]


@pytest.mark.parametrize("crlf", [False, True])
async def test_events_are_the_same_byte_by_byte(crlf: bool) -> None:
    wire = WIRE.replace(b"\n", b"\r\n") if crlf else WIRE
    assert await cut(wire[place : place + 1] for place in range(len(wire))) == [*framed(CHAT_STREAM), DONE]


async def test_event_of_a_megabyte_in_small_reads_is_one_event() -> None:
    wire = framed([chat_chunk({"content": "x" * 1_000_000})])[0] + DONE
    parts = [wire[start : start + 4096] for start in range(0, len(wire), 4096)]
    assert await cut(parts) == [wire.removesuffix(DONE), DONE]


async def test_nothing_private_reaches_the_client_and_nothing_else_is_missing() -> None:
    for chunks in (CHAT_STREAM, TEXT_STREAM):
        got, harvest, _ = await relayed([*framed(chunks), DONE])
        expected = [
            without(json.loads(chunk), "kv_transfer_params", "token_ids", "prompt_token_ids")
            for chunk in chunks
            if chunk != CHAT_STREAM[2]
        ]
        assert [json.loads(event.removeprefix(b"data: ")) for event in got[:-1]] == expected
        assert got[-1] == DONE
        assert all(event.endswith(b"\n\n") for event in got)
        assert harvest.tokens == [1, 2, 3, 10, 11, 12, 13, 2]
        assert json.loads(bytes(harvest.params or b"")) == PARAMS


async def test_events_without_anything_private_are_the_very_same_bytes() -> None:
    wire = [b'data: {"id":"c", "choices": [] ,"x":0.70}\n\n', b": ping\n\n", b"retry: 5\n\n", b"data:{}\n\n", DONE]
    got, _, _ = await relayed(wire)
    assert got == wire


async def test_comment_before_the_data_does_not_let_private_members_through() -> None:
    got, harvest, remembered = await relayed([b": ping\n" + framed([CHAT_STREAM[4]])[0], b": ping\n" + DONE])
    assert b"remote_block_ids" not in b"".join(got)
    assert b"token_ids" not in b"".join(got)
    assert harvest.params is not None
    assert len(remembered) == 1


async def test_entry_is_remembered_before_the_client_is_told_that_the_answer_is_complete() -> None:
    """A client that goes on at once must find it."""
    got, _, remembered = await relayed([*framed(CHAT_STREAM), DONE])
    assert remembered == [len(got) - 1]


@pytest.mark.parametrize(
    "parts", [framed(CHAT_STREAM), framed(CHAT_STREAM)[:2], [], [b'data: {"half'], [b": ping\n\n"]]
)
@pytest.mark.parametrize("broken", [None, "connection lost"])
async def test_stream_that_was_cut_ends_with_an_error_and_never_as_if_complete(
    parts: list[bytes], broken: str | None
) -> None:
    got, harvest, remembered = await relayed(parts, broken)
    last = json.loads(got[-1].removeprefix(b"data: "))
    assert last["error"]["code"] == 502
    assert got[-1].endswith(b"\n\n")
    assert b"[DONE]" not in b"".join(got)
    assert harvest.failed
    assert remembered == []
    if broken is not None:
        assert broken in last["error"]["message"]


async def test_half_an_event_before_the_cut_does_not_spoil_the_error() -> None:
    """The client's parser must see the error as an event of its own."""
    got, _, _ = await relayed([framed(CHAT_STREAM)[1], b'data: {"id":"c","choi'])
    events_seen = [event for event in b"".join(got).split(b"\n\n") if event]
    assert json.loads(events_seen[-1].removeprefix(b"data: "))["error"]["code"] == 502


async def test_error_of_the_engine_is_passed_on_and_nothing_is_remembered_as_good() -> None:
    error = (
        b'data: {"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}\n\n'
    )
    got, harvest, _ = await relayed([framed(CHAT_STREAM)[0], error, DONE])
    assert got[1:] == [error, DONE]
    assert harvest.failed


async def test_what_was_read_ahead_comes_first_and_is_cleaned_too() -> None:
    harvest = Harvest(client_wants_ids=False)
    wire = [*framed(CHAT_STREAM), DONE]

    async def finish() -> None:
        return None

    source = stream(wire[2:])
    following = Events(source.next)
    following.put_back(b"".join(wire[:2]))
    relay = Relay(source, following, harvest, finish, Interruption(GENEROUS), Background())
    got: list[bytes] = []
    while not relay.over:
        got += each(await relay.next())
    assert got == (await relayed(wire))[0]
    assert harvest.tokens == [1, 2, 3, 10, 11, 12, 13, 2]


@pytest.mark.parametrize(("there", "became"), [(len(WIRE), "left"), (300, "closed")])
async def test_a_stream_is_left_at_its_end_and_closed_before_it(there: int, became: str) -> None:
    """A connection whose answer was not read to its end cannot serve others, and the engine must stop."""
    source = Parts([WIRE[:there]])
    relay = relay_of(cast(Stream, source), Harvest(client_wants_ids=False), nothing)
    await relay.next()
    relay.left()
    assert source.became == [became]


@pytest.mark.parametrize("reads", [0, 1, 2])
async def test_what_decode_had_said_when_a_slow_client_left_is_remembered(reads: int) -> None:
    """It came to its end, and keeps its blocks, whether or not the client saw that."""
    stored: list[list[int] | None] = []
    harvest = Harvest(client_wants_ids=False)

    async def finish() -> None:
        stored.append(harvest.tokens)

    relay = relay_of(stream([*framed(CHAT_STREAM), DONE]), harvest, finish)
    for _ in range(reads):
        await relay.next()
    relay.left()
    await asyncio.sleep(0)
    assert stored == [[1, 2, 3, 10, 11, 12, 13, 2]]


async def test_the_end_is_told_with_nothing_behind_it() -> None:
    relay = relay_of(stream([*framed(CHAT_STREAM), DONE, b"data: more\n\n"]), Harvest(client_wants_ids=False), nothing)
    got = b""
    while not relay.over:
        got = await relay.next()
    assert got == DONE


async def test_an_entry_is_stored_once_where_a_client_leaves_before_the_end() -> None:
    stored: list[int] = []

    async def finish() -> None:
        stored.append(1)

    relay = relay_of(stream([*framed(CHAT_STREAM), DONE]), Harvest(client_wants_ids=False), finish)
    while not relay.over:
        await relay.next()
        # All was learned with the last chunk, which comes before the end.
    relay.left()
    assert stored == [1]


async def nothing() -> None:
    return None

"""What a client of a patched vLLM sees in its stream."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.turnback_engine.patch import TARGETS, patch
from engine.turnback_engine.stream import Watched, carry, with_params

from .engine_fakes import (
    Output,
    Request,
    RequestOutput,
    event,
    module_for,
    new_chat_class,
    new_text_class,
    params_of,
    produce,
)

CHAT, TEXT = TARGETS
KV = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_host": "::1", "remote_num_tokens": 40}


@pytest.fixture
def chat() -> Any:
    owner = new_chat_class()
    patch(CHAT, module_for(CHAT, owner))
    return owner()


@pytest.fixture
def text() -> Any:
    owner = new_text_class()
    patch(TEXT, module_for(TEXT, owner))
    return owner()


def turn(kv: dict[str, Any] | None = KV) -> list[RequestOutput]:
    return [
        RequestOutput([Output("a")]),
        RequestOutput([Output("b")]),
        RequestOutput([Output("c", finish_reason="stop")], kv),
    ]


async def collect(stream: AsyncGenerator[str, None]) -> list[str]:
    return [chunk async for chunk in stream]


async def test_the_chunk_with_the_finish_reason_carries_the_parameters(chat: Any) -> None:
    chunks = await collect(chat.chat_completion_stream_generator(Request(), produce(turn()), "id"))
    assert [params_of(c) for c in chunks] == ["absent", "absent", "absent", KV, "absent"]
    assert chunks[-1] == "data: [DONE]\n\n"


async def test_nothing_else_of_the_stream_changes(chat: Any) -> None:
    before = await collect(
        new_chat_class()().chat_completion_stream_generator(Request(include_usage=True), produce(turn()), "é\u2028")
    )
    after = await collect(
        chat.chat_completion_stream_generator(Request(include_usage=True), produce(turn()), "é\u2028")
    )
    field = ',"kv_transfer_params":' + json.dumps(KV, separators=(",", ":"))
    assert [chunk.replace(field, "") for chunk in after] == before


async def test_usage_comes_after_and_without_the_parameters_as_in_0_33(chat: Any) -> None:
    chunks = await collect(chat.chat_completion_stream_generator(Request(include_usage=True), produce(turn()), "id"))
    assert [params_of(c) for c in chunks[-3:]] == [KV, "absent", "absent"]
    assert "usage" in chunks[-2]


async def test_every_choice_ends_with_its_own_parameters(chat: Any) -> None:
    results = [
        RequestOutput([Output("a", index=0), Output("b", index=1)]),
        RequestOutput([Output("c", index=1, finish_reason="stop")], {"remote_request_id": "one"}),
        RequestOutput([Output("d", index=0)]),
        RequestOutput([Output("e", index=0, finish_reason="length")], {"remote_request_id": "nought"}),
    ]
    chunks = await collect(chat.chat_completion_stream_generator(Request(), produce(results), "id"))
    carried = [params_of(c) for c in chunks if params_of(c) != "absent"]
    assert carried == [{"remote_request_id": "one"}, {"remote_request_id": "nought"}]


async def test_a_choice_that_goes_on_beside_one_that_ends_carries_nothing(chat: Any) -> None:
    results = [RequestOutput([Output("a", index=0), Output("b", index=1, finish_reason="stop")], KV)]
    chunks = await collect(chat.chat_completion_stream_generator(Request(), produce(results), "id"))
    assert [params_of(c) for c in chunks] == ["absent", "absent", KV, "absent"]


async def test_text_completions_of_several_prompts(text: Any) -> None:
    results = [
        (0, RequestOutput([Output("a")])),
        (1, RequestOutput([Output("b", finish_reason="stop")], {"remote_request_id": "one"})),
        (0, RequestOutput([Output("c", finish_reason="stop")], {"remote_request_id": "nought"})),
    ]
    chunks = await collect(text.completion_stream_generator(Request(), [], produce(results), "id"))
    assert [params_of(c) for c in chunks] == [
        "absent",
        {"remote_request_id": "one"},
        {"remote_request_id": "nought"},
        "absent",
    ]


async def test_nothing_retained_means_no_field(chat: Any) -> None:
    # A stop string, for example: the engine's request is aborted and its blocks are freed.
    chunks = await collect(chat.chat_completion_stream_generator(Request(), produce(turn(None)), "id"))
    assert {params_of(c) for c in chunks} == {"absent"}


@pytest.mark.parametrize("params", [None, {}])
async def test_a_request_without_parameters_gets_vllms_own_generator(chat: Any, params: dict[str, Any] | None) -> None:
    stream = chat.chat_completion_stream_generator(Request(params), produce(turn()), "id")
    assert stream.__name__ == "chat_completion_stream_generator"
    assert {params_of(c) for c in await collect(stream)} == {"absent"}


async def test_an_error_in_the_stream_passes_unchanged(chat: Any) -> None:
    results = [RequestOutput([Output("a")]), RuntimeError("KV load failure")]
    chunks = await collect(chat.chat_completion_stream_generator(Request(), produce(results), "id"))
    assert chunks[-2:] == [event(error={"message": "KV load failure", "code": 500}), "data: [DONE]\n\n"]


async def test_an_error_that_vllm_does_not_catch_is_raised(chat: Any) -> None:
    stream = chat.chat_completion_stream_generator(Request(), produce([KeyError("bug")]), "id")
    with pytest.raises(KeyError):
        await collect(stream)


async def test_chunks_pass_as_they_come(chat: Any) -> None:
    waiting: asyncio.Queue[RequestOutput] = asyncio.Queue()

    async def engine() -> AsyncGenerator[RequestOutput, None]:
        while True:
            yield await waiting.get()

    stream = chat.chat_completion_stream_generator(Request(), engine(), "id")
    for result in turn():
        waiting.put_nowait(result)
        chunk = await asyncio.wait_for(anext(stream), 1)
        if "assistant" in chunk:
            chunk = await asyncio.wait_for(anext(stream), 1)
        assert result.outputs[0].text in chunk
        assert waiting.empty()
    await stream.aclose()


async def test_a_client_that_goes_away_closes_the_generator_inside() -> None:
    closed = []

    async def vllm() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield event(id="id", choices=[])
        finally:
            closed.append(True)

    stream = carry(vllm(), Watched(produce([])))
    await anext(stream)
    assert not closed
    await stream.aclose()
    assert closed == [True]


async def test_cancellation_reaches_the_engine(chat: Any) -> None:
    cancelled = []

    async def engine() -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput([Output("a")])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    task = asyncio.create_task(collect(chat.chat_completion_stream_generator(Request(), engine(), "id")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [True]


async def test_concurrent_requests_do_not_mix(chat: Any) -> None:
    async def engine(name: str) -> AsyncGenerator[RequestOutput, None]:
        for result in turn({"remote_request_id": name}):
            await asyncio.sleep(0)
            yield result

    names = [str(number) for number in range(20)]
    streams = await asyncio.gather(
        *(collect(chat.chat_completion_stream_generator(Request(), engine(name), name)) for name in names)
    )
    assert [params_of(chunks[-2])["remote_request_id"] for chunks in streams] == names


@pytest.mark.parametrize(
    "delta",
    [
        {},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"finish_reason": "}"}'}}]},
    ],
)
def test_the_delta_of_the_chunk_does_not_matter(delta: dict[str, Any]) -> None:
    ends = event(id="id", choices=[{"index": 0, "delta": delta, "finish_reason": "tool_calls"}])
    assert params_of(with_params(ends, KV)) == KV
    goes_on = event(id="id", choices=[{"index": 0, "delta": delta, "finish_reason": None}])
    assert with_params(goes_on, KV) is goes_on


@pytest.mark.parametrize(
    "chunk",
    [
        "data: [DONE]\n\n",
        ": keep-alive\n\n",
        "data: 1\n\n",
        'data: {"choices":7}\n\n',
        'data: {"choices":["x"]}\n\n',
        "",
        event(error={"message": "x"}),
        event(choices=[{"finish_reason": "stop"}], kv_transfer_params=None),
    ],
)
def test_what_is_not_the_end_of_a_choice_passes_unchanged(chunk: str) -> None:
    assert with_params(chunk, KV) is chunk


def test_parameters_that_are_no_json_are_left_out() -> None:
    chunk = event(choices=[{"finish_reason": "stop"}])
    assert with_params(chunk, {"handle": object()}) is chunk

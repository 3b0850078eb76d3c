"""Whether, and how, a vLLM is patched."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.turnback_engine.patch import TARGETS, Target, Unexpected, is_native, patch

from .engine_fakes import (
    Chunk,
    NativeChunk,
    Output,
    Request,
    RequestOutput,
    module_for,
    new_chat_class,
    new_text_class,
    params_of,
    produce,
)

CHAT, TEXT = TARGETS


def test_a_vllm_that_streams_the_parameters_is_known_by_its_chunk() -> None:
    assert is_native(CHAT, module_for(CHAT, new_chat_class(), NativeChunk))
    assert not is_native(CHAT, module_for(CHAT, new_chat_class(), Chunk))


@pytest.mark.parametrize(("target", "new_class"), [(CHAT, new_chat_class), (TEXT, new_text_class)])
def test_patching_twice_is_patching_once(target: Target, new_class: Any) -> None:
    owner = new_class()
    assert patch(target, module_for(target, owner))
    once = getattr(owner, target.method)
    assert not patch(target, module_for(target, owner))
    assert getattr(owner, target.method) is once


async def test_arguments_may_be_named_or_not() -> None:
    owner = new_chat_class()
    patch(CHAT, module_for(CHAT, owner))
    end = RequestOutput([Output("a", finish_reason="stop")], {"tp_size": 1})
    stream = owner().chat_completion_stream_generator(
        request_id="id", result_generator=produce([end]), request=Request(), chat_template_kwargs={}
    )
    assert [params_of(c) async for c in stream] == ["absent", {"tp_size": 1}, "absent"]


async def test_a_subclass_is_patched_with_its_parent() -> None:
    owner = new_chat_class()

    class Cohere(owner):  # type: ignore[misc, valid-type]
        pass

    patch(CHAT, module_for(CHAT, owner))
    end = RequestOutput([Output("a", finish_reason="stop")], {"tp_size": 1})
    stream = Cohere().chat_completion_stream_generator(Request(), produce([end]), "id")
    assert [params_of(c) async for c in stream] == ["absent", {"tp_size": 1}, "absent"]


class NoMethod:
    pass


class NotAGenerator:
    async def chat_completion_stream_generator(self, request: object, result_generator: object) -> None:
        pass


class OtherArguments:
    async def chat_completion_stream_generator(self, request: object, results: object) -> AsyncGenerator[str, None]:
        yield ""


@pytest.mark.parametrize(
    ("owner", "missing"),
    [
        (NoMethod, "chat_completion_stream_generator does not exist"),
        (NotAGenerator, "is not an async generator"),
        (OtherArguments, "has no argument result_generator"),
    ],
)
def test_a_vllm_that_is_not_as_expected_is_left_alone(owner: type[Any], missing: str) -> None:
    method = vars(owner).get(CHAT.method)
    with pytest.raises(Unexpected, match=missing):
        patch(CHAT, module_for(CHAT, owner))
    assert vars(owner).get(CHAT.method) is method


def test_a_chunk_that_is_no_model_is_unexpected() -> None:
    with pytest.raises(Unexpected, match="ChatCompletionStreamResponse is not a pydantic model"):
        is_native(CHAT, module_for(CHAT, new_chat_class(), NoMethod))

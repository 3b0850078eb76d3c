"""vLLM's streaming methods in small: same arguments, same kinds of chunk, same order of things."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from engine.turnback_engine.patch import Target


@dataclass
class Output:
    text: str
    index: int = 0
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    outputs: list[Output]
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Request:
    kv_transfer_params: dict[str, Any] | None = field(default_factory=lambda: {"do_remote_prefill": True})
    include_usage: bool = False


class Chunk:
    """A response model of vLLM before 0.33: no field for the parameters."""

    model_fields: dict[str, object] = {"id": None, "choices": None}  # noqa: RUF012


class NativeChunk:
    model_fields: dict[str, object] = {"id": None, "choices": None, "kv_transfer_params": None}  # noqa: RUF012


def event(**body: Any) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def choice(output: Output) -> dict[str, Any]:
    return {"index": output.index, "delta": {"content": output.text}, "finish_reason": output.finish_reason}


def new_chat_class() -> type[Any]:
    """A fresh class each time, because the plugin changes it."""

    class OpenAIServingChat:
        async def chat_completion_stream_generator(
            self,
            request: Request,
            result_generator: AsyncIterator[RequestOutput],
            request_id: str,
            chat_template_kwargs: dict[str, Any] | None = None,
        ) -> AsyncGenerator[str, None]:
            first = True
            try:
                async for result in result_generator:
                    if first:
                        yield event(id=request_id, choices=[{"index": 0, "delta": {"role": "assistant"}}])
                        first = False
                    for output in result.outputs:
                        yield event(id=request_id, choices=[choice(output)])
                if request.include_usage:
                    yield event(id=request_id, choices=[], usage={"completion_tokens": 7})
            except RuntimeError as error:
                yield event(error={"message": str(error), "code": 500})
            yield "data: [DONE]\n\n"

    return OpenAIServingChat


def new_text_class() -> type[Any]:
    class OpenAIServingCompletion:
        async def completion_stream_generator(
            self,
            request: Request,
            engine_inputs: list[Any],
            result_generator: AsyncIterator[tuple[int, RequestOutput]],
            request_id: str,
        ) -> AsyncGenerator[str, None]:
            async for prompt, result in result_generator:
                for output in result.outputs:
                    yield event(
                        id=request_id,
                        choices=[{"index": prompt, "text": output.text, "finish_reason": output.finish_reason}],
                    )
            yield "data: [DONE]\n\n"

    return OpenAIServingCompletion


def module_for(target: Target, owner: type[Any], chunk: type[Any] = Chunk) -> ModuleType:
    module = ModuleType(target.module)
    setattr(module, target.owner, owner)
    setattr(module, target.chunk, chunk)
    return module


async def produce(items: Iterable[Any]) -> AsyncGenerator[Any, None]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def params_of(chunk: str) -> Any:
    """What the chunk says of the parameters; an absent field is not the same as a null one."""
    body = chunk.removeprefix("data: ").strip()
    return "absent" if body == "[DONE]" else json.loads(body).get("kv_transfer_params", "absent")

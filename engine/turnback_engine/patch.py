"""Which methods of vLLM write streams, and whether this vLLM needs help with them."""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .stream import FIELD, Watched, carry

_OURS = "_turnback_engine"


class Unexpected(Exception):
    """vLLM is not built as this plugin expects; the message says what is missing."""


@dataclass(frozen=True)
class Target:
    """A method that turns engine outputs into a stream of server-sent events."""

    api: str
    module: str
    owner: str
    method: str
    chunk: str  # the model of one chunk, importable from ``module``


# Unchanged from vLLM 0.21 to 0.33.
TARGETS = (
    Target(
        api="chat",
        module="vllm.entrypoints.openai.chat_completion.serving",
        owner="OpenAIServingChat",
        method="chat_completion_stream_generator",
        chunk="ChatCompletionStreamResponse",
    ),
    Target(
        api="text",
        module="vllm.entrypoints.openai.completion.serving",
        owner="OpenAIServingCompletion",
        method="completion_stream_generator",
        chunk="CompletionStreamResponse",
    ),
)


def is_native(target: Target, module: ModuleType) -> bool:
    """Whether this vLLM streams the parameters itself: then its chunks have a field for them.

    Asked of the code and not of the version, which development and vendor builds number as they like.
    """
    chunk = _attribute(module, target.chunk)
    fields = getattr(chunk, "model_fields", None)
    if fields is None:
        raise Unexpected(f"{target.module}.{target.chunk} is not a pydantic model")
    return FIELD in fields


def patch(target: Target, module: ModuleType) -> bool:
    """Make the target's streams carry the parameters; False if they did already.

    Raises Unexpected, having changed nothing, if the method is not what it was in any known version.
    """
    owner = _attribute(module, target.owner)
    original: Callable[..., AsyncGenerator[str, None]] = _attribute(owner, target.method)
    if getattr(original, _OURS, False):
        return False
    where = f"{target.module}.{target.owner}.{target.method}"
    if not inspect.isasyncgenfunction(original):
        raise Unexpected(f"{where} is not an async generator")
    signature = inspect.signature(original)
    for name in ("request", "result_generator"):
        if name not in signature.parameters:
            raise Unexpected(f"{where} has no argument {name}")

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        call = signature.bind(*args, **kwargs)
        if not getattr(call.arguments["request"], FIELD, None):
            # Not a disaggregated request: vLLM's own generator, untouched.
            return original(*args, **kwargs)
        outputs: Watched[Any] = Watched(call.arguments["result_generator"])
        call.arguments["result_generator"] = outputs
        return carry(original(*call.args, **call.kwargs), outputs)

    setattr(generator, _OURS, True)
    setattr(owner, target.method, generator)
    return True


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise Unexpected(f"{holder.__name__}.{name} does not exist") from None

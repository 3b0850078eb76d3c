"""The KV parameters on their way from the engine's output to the chunk that ends a choice."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

FIELD = "kv_transfer_params"

T = TypeVar("T")


class Watched(Generic[T]):
    """``source``, item by item, remembering the KV parameters of the item that was given last.

    vLLM turns one item into chunks before it asks for the next, so while a chunk is on its way out
    ``kv_transfer_params`` is of the item that it came from, which is where vLLM 0.33 takes it from.
    Not a generator: nothing needs closing, and errors and cancellation pass straight through.
    """

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source.__aiter__()
        self.kv_transfer_params: Mapping[str, Any] | None = None

    def __aiter__(self) -> "Watched[T]":
        return self

    async def __anext__(self) -> T:
        item = await self._source.__anext__()
        # Text completions number their outputs by prompt: (index, output).
        output = item[1] if isinstance(item, tuple) else item
        self.kv_transfer_params = getattr(output, FIELD, None)
        return item


async def carry(chunks: AsyncGenerator[str, None], outputs: Watched[Any]) -> AsyncGenerator[str, None]:
    """``chunks``, each as soon as it comes; those that end a choice carry what ``outputs`` saw.

    Closing this generator closes ``chunks``, which is how an abort reaches the engine.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            params = outputs.kv_transfer_params
            yield chunk if params is None else with_params(chunk, params)


def with_params(chunk: str, params: Mapping[str, Any]) -> str:
    """``chunk`` with ``params`` as its last top-level field if it ends a choice, else ``chunk``.

    ``chunk`` is one server-sent event. What vLLM wrote stays byte for byte: the field is appended,
    the rest not written anew. What cannot be read or encoded passes unchanged.
    """
    event = chunk.rstrip("\n")
    try:
        body = json.loads(event.removeprefix("data:"))
        if not _ends_choice(body) or FIELD in body:
            return chunk
        field = json.dumps({FIELD: params}, separators=(",", ":"))
    except (ValueError, TypeError, AttributeError):
        return chunk
    return f"{event[:-1]},{field[1:]}{chunk[len(event) :]}"


def _ends_choice(body: Any) -> bool:
    # The usage chunk has no choices, an error has no such field.
    return any(choice.get("finish_reason") is not None for choice in body.get("choices", ()))

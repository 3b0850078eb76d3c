"""Both legs of a turn, sent by the client itself: the least that the engines' protocol asks for.

This is what the router is measured against, so it has every advantage: it keeps what decode retained
in a variable, compares token ids as plain lists, and sends nobody a history that token ids replace.
It reuses as the router must (only what was found equal, with block lists cut to it).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import aiohttp
import msgspec

from bench.failure import BenchFailure
from bench.second_turn.conversation import Message, sampling
from bench.second_turn.stream import CHAT, Streamed, streamed

Json = dict[str, Any]

_NO_HISTORY = [{"role": "user", "content": "."}]
_TO_PREFILL: Json = {"do_remote_decode": True, "do_remote_prefill": False}
_FIRST: Json = _TO_PREFILL | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"),
)


@dataclass(frozen=True)
class Held:
    """What decode retained of a turn: ``tokens`` have their KV where ``params`` say."""

    params: Json
    tokens: list[int]


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many tokens the two begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class BareClient:
    """Speaks to one prefill and one decode engine."""

    def __init__(self, session: aiohttp.ClientSession, prefill: str, decode: str, model: str, block_size: int) -> None:
        """``block_size`` is decode's, in tokens."""
        self._session = session
        self._prefill = prefill
        self._decode = decode
        self._model = model
        self._block_size = block_size

    async def turn(self, messages: list[Message], held: Held | None) -> tuple[Streamed, Held, int]:
        """The answer, what decode holds after it, and how many tokens of ``held`` were reused."""
        began = time.perf_counter()
        request: Json = {"messages": messages, "return_token_ids": True}
        params, reused, ids = _FIRST, 0, None
        if held is not None:
            ids = await self._render(messages)
            reused, params = self._verified(held, ids)
            request = {"messages": _NO_HISTORY}
            params = params | {"prompt_token_ids": ids}
        prefilled = await self._post(
            CHAT,
            request | {"model": self._model, "temperature": 0, "max_tokens": 1, "kv_transfer_params": params},
        )
        ids = ids or prefilled["prompt_token_ids"]
        if prefilled["usage"]["prompt_tokens"] != len(ids):
            raise BenchFailure("prefill did not take the token ids it was given")
        body = sampling(self._model) | {
            "messages": _NO_HISTORY,
            "kv_transfer_params": prefilled["kv_transfer_params"] | {"prompt_token_ids": ids},
        }
        answer = await streamed(self._session, self._decode, body, began)
        return answer, self._held(answer), reused

    async def release(self, held: Held) -> None:
        """Let decode free what it retained: prefill is asked to read nothing of it."""
        params = held.params | _TO_PREFILL | {"remote_num_tokens": 0, "remote_block_ids": [[]]}
        await self._post("/v1/completions", {"prompt": ".", "max_tokens": 1, "kv_transfer_params": params})

    def _verified(self, held: Held, ids: list[int]) -> tuple[int, Json]:
        tokens = min(common_prefix(held.tokens, ids), len(ids) - 1)
        blocks = held.params["remote_block_ids"][0][: -(-tokens // self._block_size)]
        return tokens, held.params | _TO_PREFILL | {"remote_num_tokens": tokens, "remote_block_ids": [blocks]}

    def _held(self, answer: Streamed) -> Held:
        if answer.params is None:
            raise BenchFailure("decode's stream ended without kv_transfer_params: is turnback-engine installed?")
        # The last token has no KV yet.
        tokens = (answer.prompt_ids + answer.ids)[:-1]
        if answer.params["remote_num_tokens"] != len(tokens) or len(answer.params["remote_block_ids"]) != 1:
            raise BenchFailure(f"decode holds something else than its answer: {answer.params}")
        return Held(answer.params, tokens)

    async def _render(self, messages: list[Message]) -> list[int]:
        rendered = await self._post(f"{CHAT}/render", {"model": self._model, "messages": messages})
        ids: list[int] = rendered["token_ids"]
        return ids

    async def _post(self, path: str, body: Json) -> Json:
        async with self._session.post(self._prefill + path, data=msgspec.json.encode(body)) as response:
            content = await response.read()
            if response.status != 200:
                raise BenchFailure(f"{path} on prefill answered {response.status}: {content[:500].decode()}")
            answer: Json = msgspec.json.decode(content)
            return answer

"""Both workers of a pair, in one process, that compute nothing: `python -m bench.overhead.engine PREFILL DECODE`.

The arguments are two ports. A request that was not seen before is read and checked in full, and its answer is made;
when it comes again, which its mark tells, the same bytes are sent, and its body is only counted. So the first of
each kind is slow, and all others are far faster than any router.

`POST /bench/reset` forgets what was seen, `POST /bench/pace/SECONDS` sets the time between the events of a stream
(0: all at once), `GET /bench/counts` tells how many requests of each kind came.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections import Counter
from functools import partial
from typing import Any, cast

import msgspec
import uvloop

from bench.overhead.answers import BLOCK_SIZE, Generation, params, rendered, response, stream, whole
from bench.overhead.prompts import ANSWER_PIECES, MARK, MODEL, tokenise
from proxy.server import allow_many_files

Json = dict[str, Any]

_BLOCKS = 10**9
"""So many that no router ever has to make room."""

_WINDOW = 700
"""Bytes, at both ends of a body, in which its mark is."""

_CHAT = b"/v1/chat/completions"
_RENDER = _CHAT + b"/render"
_ONE = ANSWER_PIECES[:1]


class _Wrong(Exception):
    """A request that no router should send."""


class Pair:
    """What both workers know."""

    def __init__(self) -> None:
        self.pace = 0.0
        self.counts: Counter[str] = Counter()
        self._answers: dict[tuple[str, bytes, bytes], tuple[str, list[bytes]]] = {}
        self._started = time.time()

    def answer(self, role: str, method: bytes, path: bytes, parts: list[bytes]) -> list[bytes]:
        """What to send, one by one if it is paced."""
        mark = _mark(parts) if path in (_CHAT, _RENDER) else b""
        known = self._answers.get((role, path, mark)) if mark else None
        if known is None:
            try:
                known = self._new(role, method, path, b"".join(parts))
            except (_Wrong, msgspec.DecodeError, KeyError, TypeError) as error:
                known = (f"{role}: wrong", [response(repr(error).encode(), 500)])
            if mark:
                self._answers[role, path, mark] = known
        self.counts[known[0]] += 1
        return known[1]

    def _new(self, role: str, method: bytes, path: bytes, body: bytes) -> tuple[str, list[bytes]]:
        if path == _RENDER:
            return f"{role}: render", [rendered(tokenise(msgspec.json.decode(body)["messages"]))]
        if path == _CHAT:
            return self._chat(role, msgspec.json.decode(body))
        if path.startswith(b"/bench/"):
            return "bench", [self._bench(path)]
        if path == b"/v1/completions":
            # Only probed, and used to give blocks back.
            return f"{role}: completion", [response(b'{"choices":[]}')]
        return f"{role}: {path.decode()}", [self._small(method, path)]

    def _chat(self, role: str, body: Json) -> tuple[str, list[bytes]]:
        given = body.get("kv_transfer_params") or {}
        ids = given.get("prompt_token_ids")
        made = tokenise(body["messages"])
        if ids is None:
            ids = made
        elif len(made) > 100 and ids != made:
            raise _Wrong("other token ids than those of the messages")
        pieces = ANSWER_PIECES if body.get("max_tokens") == len(ANSWER_PIECES) else _ONE
        kind, held = "plain", None
        if given.get("do_remote_decode"):
            kind, held = "prefill", params("prefill", len(ids))
        elif given.get("do_remote_prefill"):
            if given["remote_num_tokens"] != len(ids):
                raise _Wrong("blocks of another prompt")
            kind, held = "decode", params("decode", len(ids) + len(pieces) - 1)
        if kind == "prefill" and given.get("remote_block_ids"):
            kind = "prefill with reuse"
        one = Generation(ids, bool(body.get("return_token_ids")), pieces, held)
        return f"{role}: {kind}", stream(one) if body.get("stream") else [whole(one)]

    def _bench(self, path: bytes) -> bytes:
        if path == b"/bench/counts":
            return response(msgspec.json.encode(self.counts))
        if path == b"/bench/reset":
            self._answers.clear()
            self.counts.clear()
        elif path.startswith(b"/bench/pace/"):
            self.pace = float(path.rpartition(b"/")[2])
        return response(b"{}")

    def _small(self, method: bytes, path: bytes) -> bytes:
        if path == b"/health":
            return response(b"")
        if path == b"/version":
            return response(b'{"version":"0.33.0"}')
        if path == b"/v1/models":
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 10**6}
            return response(msgspec.json.encode({"object": "list", "data": [card]}))
        if path == b"/metrics":
            return response(self._metrics().encode(), content_type=b"text/plain; version=0.0.4")
        return response(b'{"detail":"Not Found"}', 404)

    def _metrics(self) -> str:
        labels = f'engine="0",model_name="{MODEL}"'
        return (
            f"process_start_time_seconds {self._started}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",engine="0",num_gpu_blocks="{_BLOCKS}"}} 1.0\n'
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.0\n"
            f"vllm:num_requests_running{{{labels}}} 0.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
        )


class _Connection(asyncio.Protocol):
    def __init__(self, pair: Pair, role: str) -> None:
        self._pair = pair
        self._role = role
        self._head = b""
        self._missing = 0
        self._parts: list[bytes] = []
        self._line: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._parts.append(data)
            self._missing -= len(data)
        else:
            data = self._head + data if self._head else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            self._head = b""
            head = data[:end]
            self._line = head[: head.index(b"\r\n")].split(b" ")
            body = data[end + 4 :]
            self._parts = [body]
            self._missing = _length(head) - len(body)
        if self._missing == 0:
            self._answer()

    def _answer(self) -> None:
        parts = self._pair.answer(self._role, self._line[0], self._line[1], self._parts)
        self._parts = []
        if len(parts) == 1 or not self._pair.pace:
            self._transport.writelines(parts)
            return
        self._transport.write(parts[0])
        # Streams that began together do not stay in step, as an engine's would not.
        self._later(random.random() * self._pair.pace, parts, 1)

    def _next(self, parts: list[bytes], number: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(parts[number])
        if number + 1 < len(parts):
            self._later(self._pair.pace if number + 2 < len(parts) else 0.0, parts, number + 1)

    def _later(self, seconds: float, parts: list[bytes], number: int) -> None:
        asyncio.get_running_loop().call_later(seconds, partial(self._next, parts, number))


def _length(head: bytes) -> int:
    small = head.lower()
    begin = small.find(b"content-length:")
    if begin < 0:
        return 0
    end = small.find(b"\r", begin)
    return int(small[begin + 15 : end if end > 0 else len(small)])


def _mark(parts: list[bytes]) -> bytes:
    """In front, or at the end where a router sorts a request's members."""
    first = parts[0] if len(parts[0]) >= _WINDOW or len(parts) == 1 else b"".join(parts[:3])
    begin = first.find(MARK, 0, _WINDOW)
    if begin < 0:
        first = (parts[-1] if len(parts[-1]) >= _WINDOW or len(parts) == 1 else b"".join(parts[-3:]))[-_WINDOW:]
        begin = first.find(MARK)
        if begin < 0:
            return b""
    return first[begin : first.index(b".", begin)]


async def serve(prefill: int, decode: int) -> None:
    """Until the process is ended."""
    pair = Pair()
    loop = asyncio.get_running_loop()
    for role, port in (("prefill", prefill), ("decode", decode)):
        await loop.create_server(lambda role=role: _Connection(pair, role), "127.0.0.1", port, backlog=4096)  # type: ignore[misc]
    await loop.create_future()


if __name__ == "__main__":
    allow_many_files()
    gc.disable()
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))

"""An engine that computes nothing: `python -m bench.overhead.instant PORT TOKENS SECONDS`.

A prefill leg is answered at once, a decode leg by a stream of TOKENS events, one every SECONDS, whose contents are
their numbers: whoever reads a stream can tell whether it is all there. What is measured against it is the router.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from aiohttp import web

from proxy.server import allow_many_files

_HEADERS = {"Content-Type": "text/event-stream"}

_HELD = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "instant", "remote_request_id": "r",
    "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[1]], "remote_num_tokens": 8, "tp_size": 1,
}  # fmt: skip

_PREFILLED = {
    "id": "p", "object": "chat.completion", "model": "instant", "kv_transfer_params": _HELD,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "0"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
}  # fmt: skip


class Instant:
    """The server."""

    def __init__(self, tokens: int, seconds: float) -> None:
        self._seconds = seconds
        self._events = [_event(str(number), None) for number in range(tokens - 1)]
        self._events.append(_event(str(tokens - 1), "stop"))
        self._started = time.time()
        self.application = web.Application(client_max_size=2**26)
        self.application.router.add_get("/health", self._health)
        self.application.router.add_get("/metrics", self._metrics)
        self.application.router.add_get("/v1/models", self._models)
        self.application.router.add_post("/v1/chat/completions", self._chat)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self._started}\n")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "instant", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not body.get("stream"):
            return web.json_response(_PREFILLED)
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        for event in self._events:
            await response.write(event)
            await asyncio.sleep(self._seconds)
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(content: str, finished: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finished}
    chunk = {"id": "d", "object": "chat.completion.chunk", "model": "instant", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


if __name__ == "__main__":
    allow_many_files()
    port, tokens, seconds = sys.argv[1:]
    web.run_app(
        Instant(int(tokens), float(seconds)).application,
        host="127.0.0.1",
        port=int(port),
        access_log=None,
        print=None,
        backlog=4096,
    )

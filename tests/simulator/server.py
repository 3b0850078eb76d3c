"""The HTTP side of an engine: routes, records, ordered faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .answers import failure_body, full_answer
from .faults import Fault, Point
from .metrics import exposition
from .prepare import Prepared, prepare, render
from .recording import Recorded
from .streams import DONE, event, stream_events
from .template import render_chat
from .tokenizer import decode, encode
from .transfer import EngineDied, KVLoadFailed, names_remote
from .validation import Refused, check, check_length, check_model, error_body, parse

if TYPE_CHECKING:
    from .engine import SimEngine

Json = dict[str, Any]

_GENERATE = {"/v1/chat/completions": True, "/v1/completions": False}
_RENDER = {f"{path}/render": chat for path, chat in _GENERATE.items()}


class Server:
    """Answers for one engine. Everything it is sent is recorded before anything else is done."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        record = Recorded(request.method, request.path, request.headers.copy(), raw)
        engine = self._engine
        (engine.requests if request.method == "POST" else engine.probes).append(record)
        engine.busy += 1
        engine.idle.clear()
        try:
            return await self._answer(request, record)
        except (asyncio.CancelledError, ConnectionError):
            record.aborted = True
            raise
        finally:
            engine.busy -= 1
            if not engine.busy:
                engine.idle.set()

    async def _answer(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        fault = self._engine.faults.take(record)
        if fault is not None:
            if fault.kind == "fail":
                body = fault.body or error_body("Simulated failure", "InternalServerError", fault.status)
                return _json(record, body, fault.status, fault.headers)
            await _strike(request, fault, "before_headers")
        key = self._engine.options.api_key
        if (
            key is not None
            and request.path.startswith("/v1")
            and request.headers.get("Authorization") != f"Bearer {key}"
        ):
            return _json(record, {"error": "Unauthorized"}, 401)
        try:
            response = await self._route(request, record, fault)
        except Refused as refused:
            return _json(record, refused.body, refused.status)
        return response

    async def _route(self, request: web.Request, record: Recorded, fault: Fault | None) -> web.StreamResponse:
        if request.method == "POST" and request.path in _GENERATE:
            return await self._generate(request, record, fault, chat=_GENERATE[request.path])
        routes: dict[tuple[str, str], Callable[[web.Request, Recorded], Awaitable[web.StreamResponse]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/load"): self._load,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            **{("POST", path): self._render for path in _RENDER},
        }
        if self._engine.options.offers_tokenize:
            routes["POST", "/tokenize"] = self._tokenize
        handler = routes.get((request.method, request.path))
        if handler is None:
            return _json(record, error_body("Not Found", "Not Found", 404), 404)
        return await handler(request, record)

    # --- small endpoints ------------------------------------------------------------------

    async def _health(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        record.status = 200 if self._engine.core.crashed is None else 503
        return web.Response(status=record.status)

    async def _version(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        return _json(record, {"version": self._engine.options.version})

    async def _load(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        core = self._engine.core
        return _json(record, {"server_load": len(core.running) + len(core.waiting)})

    async def _models(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        options = self._engine.options
        cards: list[Json] = [
            {
                "id": name,
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "vllm",
                "root": options.model,
                "parent": None if name == options.model else options.model,
                "max_model_len": options.context_length,
                "permission": [],
            }
            for name in (options.model, *options.adapters)
        ]
        return _json(record, {"object": "list", "data": cards})

    async def _metrics(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        record.status = 200
        return web.Response(text=exposition(self._engine.core, self._engine.start_time))

    async def _tokenize(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        options = self._engine.options
        body = parse(record.raw, request.headers.get("Content-Type", ""))
        check_model(body, options)
        if "messages" in body:
            check({k: v for k, v in body.items() if k != "prompt"}, options, chat=True)
            ids = list(render_chat(body, whole_request=False).ids)
        else:
            check(body, options, chat=False)
            ids = encode(body["prompt"])
        texts = [decode([i], skip_special=False) for i in ids] if body.get("return_token_strs") else None
        answer = {"count": len(ids), "max_model_len": options.context_length, "tokens": ids}
        return _json(record, answer | {"token_strs": texts})

    async def _render(self, request: web.Request, record: Recorded) -> web.StreamResponse:
        options = self._engine.options
        if not options.offers_render:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return _json(record, error_body(message, "PermissionDeniedError", 403), 403)
        chat = _RENDER[request.path]
        body = parse(record.raw, request.headers.get("Content-Type", ""))
        check(body, options, chat=chat)
        check_model(body, options)
        prompts = render(body, options, chat=chat)
        answers = []
        for prompt in prompts:
            check_length(len(prompt.ids), options)
            answers.append(
                {
                    "request_id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
                    "token_ids": list(prompt.ids),
                    "token_offsets": None,
                    "features": {"mm_hashes": {"image": list(prompt.media)}} if prompt.media else None,
                    "content_parts": None,
                    "sampling_params": {},
                    "model": body.get("model"),
                    "stream": bool(body.get("stream")),
                    "cache_salt": body.get("cache_salt"),
                    "kv_transfer_params": None,
                }
            )
        return _json(record, answers[0] if chat else answers)

    # --- generation ---------------------------------------------------------------------------

    async def _generate(
        self, request: web.Request, record: Recorded, fault: Fault | None, *, chat: bool
    ) -> web.StreamResponse:
        engine = self._engine
        core = engine.core
        body = parse(record.raw, request.headers.get("Content-Type", ""))
        try:
            check(body, engine.options, chat=chat)
            if core.crashed is not None:
                raise EngineDied(core.crashed)
            prepared = prepare(body, engine.options, chat=chat, header_id=request.headers.get("X-Request-Id"))
        except Refused as refused:
            params = body.get("kv_transfer_params")
            if refused.parsed and isinstance(params, dict) and params.get("do_remote_prefill"):
                core.reject(params)
            self._notice_members(record)
            raise
        except EngineDied as death:
            return _json(record, failure_body(death), 500)
        record.request_ids = [seq.request_id for seq in prepared.sequences]
        self._notice_params(prepared)
        if body.get("stream"):
            return await self._stream(request, record, prepared, fault)
        try:
            answer = await full_answer(core, prepared)
        except (KVLoadFailed, EngineDied) as failure:
            return _json(record, failure_body(failure), 500)
        if fault is not None and fault.kind != "fail":
            await _strike(request, fault, "before_answer")
            return await self._broken_off(request, record, answer, fault)
        return _json(record, answer, headers=self._headers(request))

    def _headers(self, request: web.Request) -> dict[str, str]:
        if not self._engine.options.request_id_headers:
            return {}
        return {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}

    async def _stream(
        self, request: web.Request, record: Recorded, prepared: Prepared, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers(request))
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        record.status = 200
        await response.prepare(request)
        await _strike(request, fault, "after_headers")
        sent = 0
        async with contextlib.aclosing(stream_events(self._engine.core, prepared)) as events:
            async for data in events:
                if fault is not None and sent >= fault.events:
                    await _strike(request, fault, "mid_stream")
                    if fault.kind == "error_event":
                        body = fault.body or error_body("Internal server error", "InternalServerError", 500)
                        await response.write(event(body))
                        await response.write(DONE)
                        break
                await self._engine.pass_gate()
                await response.write(data)
                sent += 1
        await response.write_eof()
        return response

    async def _broken_off(
        self, request: web.Request, record: Recorded, answer: Json, fault: Fault
    ) -> web.StreamResponse:
        text = json.dumps(answer).encode()
        response = web.StreamResponse(headers=self._headers(request))
        response.content_type = "application/json"
        response.content_length = len(text)
        record.status = 200
        await response.prepare(request)
        await _strike(request, fault, "after_headers")
        await response.write(text[: len(text) // 2])
        await _strike(request, fault, "mid_stream")
        await response.write(text[len(text) // 2 :])
        await response.write_eof()
        return response

    # --- what an engine would not notice ----------------------------------------------------------

    def _notice_members(self, record: Recorded) -> None:
        for name in sorted(self._engine.options.forbidden_members & record.json.keys()):
            self._engine.cluster.report("forbidden-member", self._engine.name, name)

    def _notice_params(self, prepared: Prepared) -> None:
        """KV parameters that come from an engine must come with all the members it gave them."""
        params = prepared.body.get("kv_transfer_params")
        if not isinstance(params, dict) or not names_remote(params):
            return
        wanted = {"remote_num_tokens", "remote_blocks_expiry_time", "tp_size", "dcp_size", "transfer_mode"}
        if self._engine.options.unknown_members:
            wanted.add("sim_opaque")
        if lost := sorted(wanted - params.keys()):
            self._engine.cluster.report("params-lost", self._engine.name, ", ".join(lost))


async def _strike(request: web.Request, fault: Fault | None, point: Point) -> None:
    """Hang or hang up, if that was ordered for this point. Does not return if it was."""
    if fault is None or not fault.at(point):
        return
    if fault.kind == "close":
        await asyncio.sleep(0)
        if request.transport is not None:
            request.transport.close()
        raise ConnectionResetError("hung up, as ordered")
    await asyncio.get_running_loop().create_future()


def _json(record: Recorded, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    record.status = status
    return web.json_response(body, status=status, headers=headers)

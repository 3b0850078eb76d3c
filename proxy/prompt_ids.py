"""A prompt's token ids, as the engine would make them, without an answer."""

import time

import msgspec
import structlog

from proxy.body import dump
from proxy.call import Call, Report
from proxy.dialects import ClientRequest, Dialect
from proxy.pool import Pool
from proxy.probe import tokenized_ids
from proxy.servers import RenderServer, Server, forwarding
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.token_ids import TokenIds
from proxy.upstream import Answer, Failed, Refused, Upstream

log = structlog.get_logger()

_TRIES = 2

_REST_SECONDS = 10.0
"""In which a render server that failed is not asked again: it would cost every turn its time-out."""


class PromptIds:
    """Asks whoever is known to tell them right: a render server, else a worker."""

    def __init__(self, settings: Settings, pool: Pool, upstream: Upstream, metrics: Metrics) -> None:
        self._settings = settings
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics
        self._render_rests_until = 0.0

    @property
    def _render_server(self) -> RenderServer | None:
        """The render server, if there is one and it did not just fail."""
        if self._settings.render is None or time.monotonic() < self._render_rests_until:
            return None
        return RenderServer(self._settings.render)

    async def of(self, call: Call, report: Report) -> TokenIds | None:
        """The ids; None if nobody tells them, or not surely right, or the engine would refuse the request."""
        if (given := call.dialect.given_ids(call.request)) is not None:
            return TokenIds.of(given)
        began = time.perf_counter()
        try:
            return await self._asked(call.dialect, call.request)
        finally:
            report.render_seconds = time.perf_counter() - began
            self._metrics.render.observe(report.render_seconds)

    async def _asked(self, dialect: Dialect, request: ClientRequest) -> TokenIds | None:
        if self._render_server is not None and self._pool.trusts_render(dialect.name):
            answer = await self._rendered(self._render_server, dialect, request)
            if not isinstance(answer, Failed):
                return self._ids(dialect, answer)
            self._render_rests_until = time.monotonic() + _REST_SECONDS
            log.warning("the render server does not answer: workers are asked for a while", detail=answer.detail)
        tried: tuple[str, ...] = ()
        for _ in range(_TRIES):
            worker = self._pool.rendering(dialect.name, tried)
            if worker is None or worker.capabilities is None:
                return None
            if dialect.name in worker.capabilities.renders:
                answer = await self._rendered(worker, dialect, request)
                if not isinstance(answer, Failed):
                    return self._ids(dialect, answer)
            else:
                answer = await self._tokenized(worker, dialect, request)
                if not isinstance(answer, Failed):
                    return self._tokens(answer)
            # Asking changes nothing on a worker, so another may be asked.
            tried = (*tried, worker.name)
        return None

    async def _rendered(self, server: Server, dialect: Dialect, request: ClientRequest) -> Answer | Refused | Failed:
        return await self._upstream.post(
            forwarding(server, request.forwarded),
            dialect.render_path,
            dump(request.members),
            self._settings.render_timeout,
        )

    async def _tokenized(self, server: Server, dialect: Dialect, request: ClientRequest) -> Answer | Refused | Failed:
        body = dialect.tokenize_body(request)
        if body is None:
            return Refused(400, "", b"")
        return await self._upstream.post(
            forwarding(server, request.forwarded), "/tokenize", body, self._settings.render_timeout
        )

    def _ids(self, dialect: Dialect, answer: Answer | Refused | Failed) -> TokenIds | None:
        try:
            return dialect.rendered_ids(answer.body) if isinstance(answer, Answer) else None
        except (msgspec.DecodeError, RecursionError):
            return None

    def _tokens(self, answer: Answer | Refused) -> TokenIds | None:
        try:
            return tokenized_ids(answer.body) if isinstance(answer, Answer) else None
        except (msgspec.DecodeError, RecursionError):
            return None

"""A prompt's token ids, as the engine would make them, without an answer."""

import msgspec

from proxy.body import dump
from proxy.dialects import ClientRequest, Dialect
from proxy.pool import Pool
from proxy.probe import tokenized_ids
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Answer, RenderServer, Server, Upstream


class PromptIds:
    """Asks whoever is known to tell them right: a render server, else a worker."""

    def __init__(self, settings: Settings, pool: Pool, upstream: Upstream, metrics: Metrics) -> None:
        self._settings = settings
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics

    async def of(self, dialect: Dialect, request: ClientRequest) -> list[int] | None:
        """The ids; None if nobody tells them, or not surely right, or the engine would refuse the request."""
        if (given := dialect.given_ids(request)) is not None:
            return given
        with self._metrics.render.time():
            return await self._asked(dialect, request)

    async def _asked(self, dialect: Dialect, request: ClientRequest) -> list[int] | None:
        if self._settings.render is not None:
            return await self._rendered(RenderServer(self._settings.render), dialect, request)
        worker = self._pool.rendering(dialect.name)
        if worker is None or worker.capabilities is None:
            return None
        if dialect.name in worker.capabilities.renders:
            return await self._rendered(worker, dialect, request)
        return await self._tokenized(worker, dialect, request)

    async def _rendered(self, server: Server, dialect: Dialect, request: ClientRequest) -> list[int] | None:
        answer = await self._upstream.post(
            server, dialect.render_path, dump(request.members), self._settings.render_timeout
        )
        try:
            return dialect.rendered_ids(answer.body) if isinstance(answer, Answer) else None
        except msgspec.DecodeError:
            return None

    async def _tokenized(self, server: Server, dialect: Dialect, request: ClientRequest) -> list[int] | None:
        body = dialect.tokenize_body(request)
        if body is None:
            return None
        answer = await self._upstream.post(server, "/tokenize", body, self._settings.render_timeout)
        try:
            return tokenized_ids(answer.body) if isinstance(answer, Answer) else None
        except msgspec.DecodeError:
            return None

"""A page for people: does reuse pay here, and is all well."""

import asyncio
import time
from importlib import resources
from importlib.metadata import version
from pathlib import PurePath

import msgspec
from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from proxy.dashboard import Figures, Newest, ToldTurn, figures_of
from proxy.dashboard.figures import OutcomeTurns, PromptTokens, Ttft, WorkerFigures
from proxy.drain import Drain
from proxy.pool import Pool
from proxy.telemetry import Metrics
from router.workers import Role, Worker

_FRESH_SECONDS = 1.0
"""However many look at the page, the figures are put together no more often."""

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # So that a page and its script are of one version.
    "cache-control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class ShownWorker(msgspec.Struct, frozen=True):
    """A worker as this process sees it, and what the metrics tell of it."""

    role: str
    worker: str
    up: bool
    down: bool
    """Neither is so of one that was not probed yet."""
    draining: bool
    figures: WorkerFigures


class Shown(msgspec.Struct, frozen=True):
    """The answer of ``/dashboard/data``. No conversation's id, nor any text."""

    version: str
    at: float
    """Seconds since the epoch."""
    ready: bool
    draining: bool
    running: int
    queued: int
    turns: list[OutcomeTurns]
    prompt_tokens: PromptTokens
    ttft: Ttft
    workers: list[ShownWorker]
    newest: list[ToldTurn]


class Dashboard:
    """``/dashboard``, and what it is made of."""

    def __init__(self, pool: Pool, metrics: Metrics, newest: Newest, drain: Drain) -> None:
        self._pool = pool
        self._metrics = metrics
        self._newest = newest
        self._drain = drain
        self._files = {
            file.name: file.read_bytes() for file in resources.files("proxy.dashboard").joinpath("page").iterdir()
        }
        self._asking = asyncio.Lock()
        self._answer = b""
        self._answered_at = -_FRESH_SECONDS

    def routes(self) -> APIRouter:
        """The endpoints."""
        routes = APIRouter(prefix="/dashboard")

        @routes.get("")
        async def page() -> Response:
            """The page. It asks for the figures every two seconds, and for nothing from elsewhere."""
            return self._file("index.html")

        @routes.get("/data")
        async def data() -> Response:
            """What the page shows, as JSON; at most a second old."""
            async with self._asking:
                if time.monotonic() - self._answered_at >= _FRESH_SECONDS:
                    self._answer = msgspec.json.encode(await self._look())
                    self._answered_at = time.monotonic()
            return Response(self._answer, media_type="application/json", headers=_HEADERS)

        @routes.get("/{file}")
        async def part(file: str) -> Response:
            """A file that the page needs."""
            return self._file(file)

        return routes

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        return Response(self._files[name], media_type=_TYPES[PurePath(name).suffix], headers=_HEADERS)

    async def _look(self) -> Shown:
        # In a thread: the metrics of several processes take some milliseconds, for which streams must not wait.
        figures = await asyncio.to_thread(lambda: figures_of(self._metrics.families()))
        workers = [worker for role in Role for worker in self._pool.all(role)]
        return Shown(
            version=version("turnback"),
            at=time.time(),
            ready=any(worker.up for worker in workers) and not self._drain.began,
            draining=self._drain.began,
            running=figures.running,
            queued=figures.queued,
            turns=figures.turns,
            prompt_tokens=figures.prompt_tokens,
            ttft=figures.ttft,
            workers=[_shown(worker, figures) for worker in workers],
            newest=await self._newest.all(),
        )


def _shown(worker: Worker, figures: Figures) -> ShownWorker:
    return ShownWorker(
        role=worker.role,
        worker=worker.name,
        up=worker.health.up,
        down=worker.health.down,
        draining=worker.draining,
        figures=figures.workers.get((worker.role, worker.name), WorkerFigures()),
    )

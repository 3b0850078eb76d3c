"""What can be asked of the proxy itself, and the list of models."""

from importlib.metadata import version

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.drain import Drain
from proxy.errors import nobody_answers
from proxy.pool import Pool
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Refused, Upstream
from router.workers import Role

_MODELS_TIMEOUT = 10.0


def info_routes(pool: Pool, upstream: Upstream, metrics: Metrics, drain: Drain) -> APIRouter:
    """``/health``, ``/ready``, ``/version``, ``/metrics`` and ``/v1/models``."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """This process is alive, whatever the workers are."""
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready() -> JSONResponse:
        """200 if a turn can be served: some worker is up and this process is not to end; and how each worker is."""
        workers = [worker for role in Role for worker in pool.all(role)]
        able = any(worker.up for worker in workers) and not drain.began
        return JSONResponse(
            {
                "ready": able,
                "draining": drain.began,
                "workers": [
                    {
                        "worker": worker.name,
                        "url": worker.url,
                        "role": worker.role,
                        "up": worker.up,
                        "probed": worker.discovered,
                        "draining": worker.draining,
                        "breaker": "closed" if worker.breaker.closed else "open",
                        "in_flight": worker.in_flight,
                        "generation": worker.generation,
                    }
                    for worker in workers
                ],
            },
            status_code=200 if able else 503,
        )

    @routes.get("/version")
    async def version_() -> dict[str, str]:
        """The version of Turnback."""
        return {"version": version("turnback")}

    @routes.get("/metrics")
    async def metrics_() -> Response:
        """For Prometheus."""
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/models")
    async def models() -> Response:
        """What a decode worker says it serves; if none answers, what a prefill worker says."""
        for role in (Role.DECODE, Role.PREFILL):
            tried: list[str] = []
            while len(tried) < len(pool.all(role)):
                worker = pool.aide(role, tried=tuple(tried))
                answer = await upstream.get(worker, "/v1/models", _MODELS_TIMEOUT)
                if isinstance(answer, Answer | Refused):
                    return Response(answer.body, answer.status, media_type=answer.content_type)
                tried.append(worker.name)
        error = nobody_answers()
        retry = {"retry-after": str(error.retry_after)}
        return Response(error.body(), error.status, retry, media_type="application/json")

    return routes

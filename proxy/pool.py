"""All workers, watched in the background."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from proxy.probe import ProbeFailed, Vitals, discover, vitals
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Upstream
from router.select import choose, is_at, is_up, least_loaded, not_among
from router.workers import Role, Worker

log = structlog.get_logger()


class Pool:
    """The workers, and who is up, which start of each it is, and what it can do."""

    def __init__(self, settings: Settings, upstream: Upstream, metrics: Metrics) -> None:
        self._settings = settings
        self._upstream = upstream
        self._metrics = metrics
        self._workers = {
            (role, url): Worker(url, role)
            for role, urls in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode))
            for url in urls
        }
        self._chosen = 0
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch."""
        self._watchers = [asyncio.create_task(self._watch(worker)) for worker in self._workers.values()]

    async def stop(self) -> None:
        """Stop watching."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def all(self, role: Role) -> list[Worker]:
        """The workers of one role, in the order of the settings."""
        return [worker for worker in self._workers.values() if worker.role is role]

    def find(self, role: Role, url: str) -> Worker | None:
        """The worker at ``url``; None if it is not in the pool."""
        return self._workers.get((role, url))

    def choose(self, role: Role, *, preferred: str | None = None, tried: tuple[str, ...] = ()) -> Worker:
        """The worker for the next leg: the ``preferred`` one if it is up, else the least loaded.

        Those ``tried`` in this turn come last.
        """
        self._chosen += 1
        chosen = choose(self.all(role), (not_among(tried), is_up), (is_at(preferred), least_loaded), self._chosen)
        if chosen is None:
            raise RuntimeError(f"the settings name no {role} worker")
        return chosen

    def rendering(self, dialect: str) -> Worker | None:
        """A worker that tells token ids for ``dialect``; prefill first, it has the time."""
        for way in ("renders", "tokenizes"):
            for role in (Role.PREFILL, Role.DECODE):
                able = [
                    worker
                    for worker in self.all(role)
                    if worker.up and worker.capabilities and dialect in getattr(worker.capabilities, way)
                ]
                self._chosen += 1
                if (found := choose(able, (), (least_loaded,), self._chosen)) is not None:
                    return found
        return None

    @contextmanager
    def leg(self, worker: Worker, tokens: int) -> Iterator[None]:
        """Counts a leg of ``tokens`` prompt tokens (0 if unknown) as running on ``worker``."""
        worker.in_flight += 1
        worker.in_flight_tokens += tokens
        try:
            yield
        finally:
            worker.in_flight -= 1
            worker.in_flight_tokens -= tokens

    def distrust(self, worker: Worker, dialect: str) -> None:
        """``worker`` was seen to answer another prompt than it was given ids for: believe it no more."""
        if worker.capabilities is None:
            return
        worker.capabilities = dataclasses.replace(
            worker.capabilities,
            renders=worker.capabilities.renders - {dialect},
            tokenizes=worker.capabilities.tokenizes - {dialect},
            honours_ids=worker.capabilities.honours_ids - {dialect},
        )

    async def _watch(self, worker: Worker) -> None:
        while True:
            try:
                await self._look(worker)
            except Exception:
                # A watcher that dies would leave its worker as it was for good.
                log.exception("probing a worker failed", worker=worker.url)
            await asyncio.sleep(self._settings.probe_interval)

    async def _look(self, worker: Worker) -> None:
        health = await self._upstream.get(worker, "/health", self._settings.probe_timeout)
        if not isinstance(health, Answer):
            self._set_up(worker, False, str(health))
            return
        metrics = await self._upstream.get(worker, "/metrics", self._settings.probe_timeout)
        seen = vitals(metrics.body.decode(errors="replace")) if isinstance(metrics, Answer) else None
        if seen is not None and seen.generation != worker.generation:
            await self._discover(worker, seen)
        self._set_up(worker, True, "")

    async def _discover(self, worker: Worker, seen: Vitals) -> None:
        if worker.capabilities is not None:
            log.warning("worker restarted: what it held is gone", worker=worker.url, role=worker.role)
            worker.capabilities = None
        try:
            # A worker busy with long prompts answers late; that is not a fault.
            worker.capabilities = await discover(self._upstream, worker, seen, 12 * self._settings.probe_timeout)
        except ProbeFailed as error:
            log.warning("worker does not tell what it can do; asked again", worker=worker.url, detail=str(error))
            return
        found = worker.capabilities
        log.info(
            "worker found",
            worker=worker.url,
            role=worker.role,
            generation=found.generation,
            block_size=found.block_size,
            num_blocks=found.num_blocks,
            renders=sorted(found.renders),
            tokenizes=sorted(found.tokenizes),
            honours_ids=sorted(found.honours_ids),
        )

    def _set_up(self, worker: Worker, up: bool, detail: str) -> None:
        if worker.up != up:
            if up:
                log.info("worker is up", worker=worker.url, role=worker.role)
            else:
                log.warning("worker is down: turns go elsewhere", worker=worker.url, role=worker.role, detail=detail)
        worker.up = up
        self._metrics.worker_up.labels(worker.role, worker.url).set(up)

"""Watches one server in the background: whether it is up, which start of it this is, how loaded it is."""

import asyncio
import dataclasses
from collections.abc import Sequence

import structlog

from proxy.background import end
from proxy.call import Clock
from proxy.probe import ProbeFailed, discover
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Failed, Refused, Upstream
from proxy.vitals import Exposition, Vitals
from router.workers import UNKNOWN_GENERATION, Capabilities, Reported, Worker

log = structlog.get_logger()

_PATIENCE = 12
"""Times the probe's time-out for a question about abilities: a worker busy with long prompts answers late."""


class Watch:
    """Probes a server and keeps its workers (its data-parallel ranks, or the one) up to date."""

    def __init__(
        self, workers: Sequence[Worker], settings: Settings, upstream: Upstream, metrics: Metrics, clock: Clock
    ) -> None:
        """``clock`` is the pool's, by which reports are dated."""
        self._workers = workers
        self._server = workers[0]
        self._settings = settings
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._watching: asyncio.Task[None] | None = None
        self._discovering: asyncio.Task[None] | None = None
        self._last_seen = 0.0
        """When it was last asked which start of it this is, and told, by the loop's clock."""

    def start(self) -> None:
        """Begin to watch."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        await end(self._watching)
        await end(self._discovering)

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                # A watch that ends would leave its workers as they were for good.
                log.exception("probing a worker failed", worker=self._server.url)
            await asyncio.sleep(self._settings.probe_interval)

    async def _look(self) -> None:
        timeout = self._settings.probe_timeout
        asked = asyncio.get_running_loop().time()
        legs = [worker.in_flight for worker in self._workers]
        health, metrics = await asyncio.gather(
            self._upstream.get(self._server, "/health", timeout),
            self._upstream.get(self._server, "/metrics", timeout),
        )
        # Before it is up again it must be known whether it was restarted.
        if isinstance(metrics, Answer):
            shown = Exposition(metrics.body.decode(errors="replace"))
            for worker, ours in zip(self._workers, legs, strict=True):
                self._read(worker, shown.of(worker.rank), ours)
            self._last_seen = asked
        self._judge(health)
        if self._server.up and self._server.capabilities is not None and not self._server.discovered:
            self._discover()

    def _read(self, worker: Worker, seen: Vitals, ours: int) -> None:
        """Take over what ``/metrics`` told; ``ours`` legs were on the worker when it was asked."""
        if worker.generation != seen.generation:
            if worker.capabilities is not None:
                log.warning("worker restarted: what it held is gone", worker=worker.name, role=worker.role)
                self._upstream.give_up_earlier(worker, self._last_seen)
                # What the earlier start failed is not held against this one.
                worker.breaker.succeeded()
            worker.capabilities = Capabilities(seen.generation)
            worker.discovered = False
            if self._discovering is not None:
                self._discovering.cancel()
        if worker.capabilities is not None:
            worker.capabilities = dataclasses.replace(
                worker.capabilities, block_size=seen.block_size, num_blocks=seen.num_blocks
            )
        self._show(worker, seen)
        if seen.running is not None:
            worker.reported = Reported(self._clock(), seen.running, seen.waiting or 0, seen.kv_usage, ours)

    def _show(self, worker: Worker, seen: Vitals) -> None:
        of_worker = worker.role, worker.name
        if seen.generation != UNKNOWN_GENERATION:
            self._metrics.worker_start.labels(*of_worker).set(float(seen.generation))
        if seen.kv_usage is not None:
            self._metrics.worker_kv_usage.labels(*of_worker).set(seen.kv_usage)
        if seen.block_size is not None and seen.num_blocks is not None:
            self._metrics.worker_kv_capacity.labels(*of_worker).set(seen.block_size * seen.num_blocks)

    def _judge(self, health: Answer | Refused | Failed) -> None:
        for worker in self._workers:
            was_up, was_down = worker.health.up, worker.health.down
            if isinstance(health, Answer):
                worker.health.good()
            else:
                worker.health.bad()
            if worker.health.up and not was_up:
                log.info("worker is up", worker=worker.name, role=worker.role)
            if worker.health.down and not was_down:
                log.warning(
                    "worker is down: turns go elsewhere", worker=worker.name, role=worker.role, detail=str(health)
                )
                # Streams that still bring something go on.
                self._upstream.stop_waiting(worker)
            self._metrics.worker_up.labels(worker.role, worker.name).set(worker.up)
            self._metrics.worker_breaker_open.labels(worker.role, worker.name).set(not worker.breaker.closed)
            self._metrics.worker_draining.labels(worker.role, worker.name).set(worker.draining)

    def _discover(self) -> None:
        """Ask what it can do, beside the probing: that may take long, and the server may die meanwhile."""
        if self._discovering is None or self._discovering.done():
            self._discovering = asyncio.create_task(self._asked())

    async def _asked(self) -> None:
        generation = self._server.generation
        try:
            found = await discover(
                self._upstream, self._server, self._settings.render, _PATIENCE * self._settings.probe_timeout
            )
        except ProbeFailed as error:
            log.warning("worker does not tell what it can do; asked again", worker=self._server.name, detail=str(error))
            return
        for worker in self._workers:
            if worker.capabilities is None or worker.generation != generation:
                continue
            worker.capabilities = dataclasses.replace(
                worker.capabilities,
                renders=found.renders,
                tokenizes=found.tokenizes,
                honours_ids=found.honours_ids,
                render_server=found.render_server,
            )
            worker.discovered = True
            log.info(
                "worker found",
                worker=worker.name,
                role=worker.role,
                generation=worker.generation,
                block_size=worker.capabilities.block_size,
                num_blocks=worker.capabilities.num_blocks,
                renders=sorted(found.renders),
                tokenizes=sorted(found.tokenizes),
                honours_ids=sorted(found.honours_ids),
            )

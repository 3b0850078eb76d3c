"""All workers: who there is, who gets the next leg, and what legs tell of them."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from random import Random

import structlog

from proxy.call import Clock
from proxy.leg import Errand, Leg, Reading
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Upstream
from proxy.watch import Watch
from proxy.worker_spec import WorkerSpec
from router.breaker import Breaker
from router.health import Health
from router.select import Bound, Wish, at_random, choose, is_available, least, load_at, not_draining, not_tried, select
from router.workers import Role, Worker

log = structlog.get_logger()


class LastWorker(Exception):
    """A role must keep one worker at least; the message names the role."""


class Pool:
    """The workers, who is up, which start of each it is, and what it can do.

    Each role has one worker at least, at any time.
    """

    def __init__(
        self,
        settings: Settings,
        upstream: Upstream,
        metrics: Metrics,
        clock: Clock = time.monotonic,
        chance: Random | None = None,
    ) -> None:
        """``clock`` need not tell the time of day, but must never go back."""
        self._settings = settings
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._chance = chance or Random()
        self._bound = Bound(settings.affinity_factor, settings.affinity_slack)
        self._workers: dict[tuple[Role, str], Worker] = {}
        self._of_role: dict[Role, tuple[Worker, ...]] = dict.fromkeys(Role, ())
        self._watches: dict[tuple[Role, str], Watch] = {}
        self._specs: dict[tuple[Role, str], WorkerSpec] = {}
        self._watching = False
        self._chosen = 0
        for role, specs in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
            for spec in specs:
                self.add(role, spec)

    # --- who there is

    def start(self) -> None:
        """Begin to watch; from then on what is added is watched too."""
        self._watching = True
        for watch in self._watches.values():
            watch.start()

    async def stop(self) -> None:
        """Stop watching."""
        self._watching = False
        await asyncio.gather(*(watch.stop() for watch in self._watches.values()))

    def add(self, role: Role, spec: WorkerSpec) -> None:
        """Have this server in the pool, as one worker for each of its ranks; one that drains is taken back.

        A server that is there already keeps its ranks and its key.
        """
        if (role, spec.url) in self._watches:
            self._set_draining(role, spec.url, False)
            return
        ranks = range(spec.data_parallel_size) if spec.data_parallel_size > 1 else (None,)
        workers = [self._worker(role, spec, rank) for rank in ranks]
        self._workers |= {(role, worker.name): worker for worker in workers}
        self._of_role[role] += tuple(workers)
        watch = Watch(workers, self._settings, self._upstream, self._metrics, self._clock)
        self._watches[role, spec.url] = watch
        self._specs[role, spec.url] = spec
        if self._watching:
            watch.start()

    def drain(self, role: Role, url: str) -> bool:
        """Give the server at ``url`` no new work; what it holds may still be read. False if it is not there."""
        return self._set_draining(role, url, True)

    def at_rest(self, role: Role, url: str) -> bool:
        """Whether the server at ``url`` drains and no leg of this process runs on it or reads from it any more."""
        workers = self.at(role, url)
        return all(worker.draining and not worker.in_flight and not worker.readers for worker in workers)

    async def remove(self, role: Role, url: str) -> bool:
        """Forget the server at ``url``: what it holds is reused no more. False if it is not there.

        Legs that run on it go on. Raises ``LastWorker`` for the only one of its role.
        """
        workers = self.at(role, url)
        if not workers:
            return False
        if len(workers) == len(self.all(role)):
            raise LastWorker(f"{url} is the only {role} worker")
        watch = self._watches.pop((role, url))
        del self._specs[role, url]
        for worker in workers:
            del self._workers[role, worker.name]
        self._of_role[role] = tuple(worker for worker in self._of_role[role] if worker.url != url)
        await watch.stop()
        for worker in workers:
            self._metrics.forget_worker(role, worker.name)
        log.info("worker was removed", worker=url, role=role)
        return True

    def all(self, role: Role) -> Sequence[Worker]:
        """The workers of one role, in the order in which they were added."""
        return self._of_role[role]

    def at(self, role: Role, url: str) -> list[Worker]:
        """The workers behind ``url``: one, or its ranks; none if it is not in the pool."""
        return [worker for worker in self.all(role) if worker.url == url]

    def spec(self, role: Role, url: str) -> WorkerSpec | None:
        """As what the server at ``url`` was added; None if it is not in the pool."""
        return self._specs.get((role, url))

    def find(self, role: Role, name: str) -> Worker | None:
        """The worker with this name; None if it is not in the pool."""
        return self._workers.get((role, name))

    # --- who gets the next leg

    def able(self, role: Role) -> bool:
        """Whether there is a worker of this role of which it is not known that a leg would fail."""
        now = self._clock()
        return any(not worker.given_up(now) for worker in self._of_role[role])

    def choose(
        self, role: Role, *, preferred: str | None = None, tried: tuple[str, ...] = (), tokens: int | None = None
    ) -> Worker:
        """The worker for the next leg, by the setting ``policy``.

        ``preferred`` is the name of the one that holds something of the conversation; those ``tried`` in
        this turn come last, and before them those without room for ``tokens`` tokens.
        """
        wish = Wish(preferred, tried, tokens)
        chosen = select(self._settings.policy, self.all(role), wish, self._bound, self._clock(), self._chance)
        if chosen is None:
            raise RuntimeError(f"there is no {role} worker")
        self._chosen += 1
        chosen.last_chosen = self._chosen
        return chosen

    def aide(self, role: Role, *, tried: tuple[str, ...] = ()) -> Worker:
        """A worker for what is no leg of a turn: a question, a release. The ``tried`` ones come last.

        It does not count for whose turn it is: where one followed each turn, all turns would go to the others.
        """
        now = self._clock()
        filters = (not_tried(tried), is_available(now), not_draining)
        chosen = choose(self.all(role), filters, (least(load_at(now)), at_random(self._chance)))
        if chosen is None:
            raise RuntimeError(f"there is no {role} worker")
        return chosen

    def trusts_render(self, dialect: str) -> bool:
        """Whether the render server makes the prompts that every prefill worker makes, as far as they were asked."""
        asked = [worker.capabilities for worker in self.all(Role.PREFILL) if worker.discovered and worker.capabilities]
        return bool(asked) and all(dialect in capabilities.render_server for capabilities in asked)

    def rendering(self, dialect: str, tried: tuple[str, ...] = ()) -> Worker | None:
        """A worker that tells token ids for ``dialect`` and is not among the ``tried``; prefill first, it has the time.

        None if there is none.
        """
        now = self._clock()
        for way in ("renders", "tokenizes"):
            for role in (Role.PREFILL, Role.DECODE):
                able = [
                    worker
                    for worker in self.all(role)
                    if worker.name not in tried
                    and worker.up
                    and worker.capabilities
                    and dialect in getattr(worker.capabilities, way)
                ]
                if not able:
                    continue
                scores = (least(load_at(now)), at_random(self._chance))
                if (found := choose(able, (is_available(now), not_draining), scores)) is not None:
                    return found
        return None

    # --- what legs tell of them

    def leg(self, worker: Worker, tokens: int) -> Leg:
        """A turn's leg on ``worker``, with ``tokens`` for it to compute or hold (0 if unknown)."""
        return Leg(worker, tokens, self._metrics.in_flight_on(worker.role, worker.name), self._clock)

    def errand(self, worker: Worker) -> Errand:
        """What runs on ``worker`` and does not say whether it serves turns."""
        return Errand(worker, 0, self._metrics.in_flight_on(worker.role, worker.name), self._clock)

    def reading(self, role: Role, name: str) -> Reading:
        """Counts a leg elsewhere that reads what the worker ``name`` holds, if that is in the pool."""
        return Reading(self.find(role, name))

    def distrust(self, worker: Worker, dialect: str) -> None:
        """``worker`` was seen to answer another prompt than it was given ids for: believe it no more."""
        if worker.capabilities is None:
            return
        worker.capabilities = dataclasses.replace(
            worker.capabilities,
            renders=worker.capabilities.renders - {dialect},
            render_server=worker.capabilities.render_server - {dialect},
            tokenizes=worker.capabilities.tokenizes - {dialect},
            honours_ids=worker.capabilities.honours_ids - {dialect},
        )

    def _worker(self, role: Role, spec: WorkerSpec, rank: int | None) -> Worker:
        settings, headers = self._settings, {}
        if spec.api_key is not None:
            headers["Authorization"] = f"Bearer {spec.api_key.get_secret_value()}"
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        return Worker(
            spec.url,
            role,
            rank=rank,
            headers=headers,
            health=Health(up_after=settings.health_up_after, down_after=settings.health_down_after),
            breaker=Breaker(failures=settings.breaker_failures, seconds=settings.breaker_seconds),
        )

    def _set_draining(self, role: Role, url: str, draining: bool) -> bool:
        workers = self.at(role, url)
        for worker in workers:
            worker.draining = draining
        return bool(workers)

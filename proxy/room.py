"""Keeps retained blocks from making running requests wait."""

import asyncio
from collections.abc import Iterable, Mapping

import structlog

from metadata_store import Holding, Record
from proxy.background import Background, end
from proxy.call import Clock
from proxy.ledger import Ledger
from proxy.memory import Memory
from proxy.pool import Pool
from proxy.put_back import put_back
from proxy.release import Releaser, Why
from proxy.settings import Settings
from proxy.telemetry import Metrics
from proxy.upstream import Answer, Upstream
from proxy.vitals import vitals
from router.room import Cache, idle, over_budget, over_share, retained_blocks, to_free
from router.workers import Role, Worker

log = structlog.get_logger()

_QUIET_SHARE = 0.85
"""Up to so much use of a cache, as last told, nobody needs to ask the worker how full it is right now."""

_ASK_SECONDS = 0.5
"""Seconds to wait for that; without an answer what is known from before has to do."""

_PATIENCE = 5.0
"""Seconds that a turn waits at most for others' blocks to be released."""


class Room:
    """Releases entries: before a turn that needs their blocks, and in the background."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        upstream: Upstream,
        memory: Memory,
        ledger: Ledger,
        releaser: Releaser,
        background: Background,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._upstream = upstream
        self._memory = memory
        self._ledger = ledger
        self._releaser = releaser
        self._background = background
        self._metrics = metrics
        self._clock = clock
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        await end(self._watching)

    def is_ample(self, worker: Worker, prompt_tokens: int | None, max_tokens: int | None) -> bool:
        """Whether a request of this size surely fits on ``worker``, or nobody can tell: there is nothing to make."""
        cache = _cache(worker)
        if cache is None or prompt_tokens is None:
            return True
        retained = self._ledger.blocks_on(worker.name, worker.generation)
        if not retained:
            return True
        told = worker.reported.kv_usage if worker.reported is not None else None
        used = max(self._ours(worker, cache, worker.in_flight_tokens), cache.blocks * (told or 0.0))
        return used + cache.needed(prompt_tokens, max_tokens) <= cache.blocks * _QUIET_SHARE

    async def make(self, worker: Worker, prompt_tokens: int | None, max_tokens: int | None) -> None:
        """Release so many of the oldest entries on ``worker`` that a turn of this size, which counts as running, fits.

        Returns when they are released, or after a few seconds.
        """
        cache = _cache(worker)
        if cache is None or prompt_tokens is None:
            return
        needed = cache.needed(prompt_tokens, max_tokens)
        running = max(0, worker.in_flight_tokens - prompt_tokens)
        used = max(self._ours(worker, cache, running), await self._reported(worker, cache))
        entries = self._ledger.on(worker.name, worker.generation)
        chosen = to_free(entries, used + needed - cache.blocks)
        if chosen:
            releases = await self._release(chosen, entries, Why.PRESSURE)
            await asyncio.wait(releases, timeout=_PATIENCE) if releases else None
            log.info(
                "retained blocks were released to make room for a turn",
                worker=worker.name,
                entries=len(chosen),
                blocks_needed=needed,
                blocks_in_use=used,
                blocks=cache.blocks,
            )

    def _ours(self, worker: Worker, cache: Cache, running_tokens: int) -> int:
        """Blocks in use, as far as this process knows."""
        return self._ledger.blocks_on(worker.name, worker.generation) - (-running_tokens // cache.block_size)

    async def relieve(self, worker: Worker, ended_tokens: int) -> None:
        """A turn of ``ended_tokens`` prompt tokens left an entry more on ``worker``.

        As many of the oldest entries are released as its other requests need: some may have come when there was room,
        and wait in its queue now. Does not wait for the releases.
        """
        cache = _cache(worker)
        if cache is None:
            return
        # The turn itself still counts as running.
        running = cache.held(max(0, worker.in_flight_tokens - ended_tokens), max(0, worker.in_flight - 1))
        excess = self._ledger.blocks_on(worker.name, worker.generation) + running - cache.blocks
        if excess > 0:
            entries = self._ledger.on(worker.name, worker.generation)
            await self._release(to_free(entries, excess), entries, Why.PRESSURE)

    async def _reported(self, worker: Worker, cache: Cache) -> int:
        """Blocks in use, as the worker tells right now; 0 if it does not."""
        answer = await self._upstream.get(worker, "/metrics", _ASK_SECONDS)
        if not isinstance(answer, Answer):
            return 0
        usage = vitals(answer.body.decode(errors="replace"), worker.rank).kv_usage
        return 0 if usage is None else round(usage * cache.blocks)

    async def _watch(self) -> None:
        while True:
            try:
                await self.tidy()
            except Exception:
                log.exception("looking after retained blocks failed; tried again")
            await asyncio.sleep(self._settings.retained_watch_interval)

    async def tidy(self) -> None:
        """One look at everything that is retained: what is idle, or more than may be, is released."""
        await self._ledger.look(self._memory.scan())
        for worker in self._pool.all(Role.DECODE):
            entries = self._ledger.on(worker.name, worker.generation)
            chosen = {
                Why.IDLE: idle(entries, self._clock(), self._settings.idle_release)
                if self._settings.idle_release is not None
                else [],
                Why.BUDGET: over_budget(entries, self._settings.retained_tokens_budget)
                if self._settings.retained_tokens_budget is not None
                else [],
                Why.PRESSURE: over_share(entries, cache, self._settings.retained_share)
                if (cache := _cache(worker)) is not None
                else [],
            }
            for why, keys in chosen.items():
                await self._release(keys, entries, why)
            self._count(worker, self._ledger.on(worker.name, worker.generation))

    async def give_back_everything(self, patience: float) -> None:
        """Release all entries: with this process ends the only store that knows of them.

        Otherwise their blocks would be in the way of its successor's turns until the engine's TTL. Waits for it up to
        ``patience`` seconds.
        """
        releases: list[asyncio.Task[None]] = []
        for worker in self._pool.all(Role.DECODE):
            entries = self._ledger.on(worker.name, worker.generation)
            releases += await self._release(entries, entries, Why.SHUTDOWN)
        if releases:
            await asyncio.wait(releases, timeout=patience)

    async def _release(self, keys: Iterable[str], entries: Mapping[str, Holding], why: Why) -> list[asyncio.Task[None]]:
        """Take the entries, so that no turn can use them any more, and have their blocks freed."""
        under_way: list[asyncio.Task[None]] = []
        for key in keys:
            # Whoever asked may be cancelled: an entry that was taken must not be lost then.
            await asyncio.shield(self._background.start(self._free(key, entries[key], why, under_way)))
        return under_way

    async def _free(self, key: str, chosen: Holding, why: Why, under_way: list[asyncio.Task[None]]) -> None:
        record = await self._memory.take(key)
        if not isinstance(record, Record):
            return
        if Holding.of(record) != chosen:
            # Another router's turn has been there since: this is not the entry that was chosen.
            await put_back(self._memory, self._releaser, key, record)
        elif (task := self._releaser.release_record(record, why)) is not None:
            under_way.append(task)

    def _count(self, worker: Worker, entries: dict[str, Holding]) -> None:
        self._metrics.retained_entries.labels(worker.name).set(len(entries))
        self._metrics.retained_tokens.labels(worker.name).set(sum(holding.tokens for holding in entries.values()))
        cache = _cache(worker)
        if cache is not None:
            self._metrics.retained_share.labels(worker.name).set(retained_blocks(entries) / cache.blocks)


def _cache(worker: Worker) -> Cache | None:
    found = worker.capabilities
    if found is None or not found.num_blocks or not found.block_size:
        return None
    return Cache(found.num_blocks, found.block_size)

"""Workers on their way out: no new work for them, and out of the pool when nobody needs them any more."""

import asyncio
import time

import structlog

from metadata_store import Record
from proxy.background import end
from proxy.call import Clock
from proxy.ledger import Ledger
from proxy.memory import Memory
from proxy.pool import LastWorker, Pool
from proxy.put_back import put_back
from proxy.release import Releaser, Why
from proxy.settings import Settings
from router.workers import Role, Worker

log = structlog.get_logger()

Server = tuple[Role, str]
"""A role, and the URL of the worker, or of all the ranks, that drains."""

_AT_ONCE = 100
"""Entries taken before their blocks are waited for: the releaser drops what is far more than it can do."""


class Departures:
    """Drains workers, and removes each when it is idle and, for decode, holds nothing usable any more.

    Conversations move off a drained decode worker by being reused: prefill reads its blocks once more, and the
    decode leg goes elsewhere. Those that do not come back expire.
    """

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        memory: Memory,
        ledger: Ledger,
        releaser: Releaser,
        clock: Clock = time.monotonic,
    ) -> None:
        """``clock`` need not tell the time of day, but must never go back."""
        self._interval = settings.probe_interval
        # An entry that was just taken is in no list, and its turn may not have sent it yet; one that was given
        # up is released only after the grace. Both need the worker to be known.
        self._quiet_for = settings.abandon_grace + settings.probe_interval
        self._pool = pool
        self._memory = memory
        self._ledger = ledger
        self._releaser = releaser
        self._clock = clock
        self._hurried: set[Server] = set()
        self._quiet_since: dict[Server, float] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch those that drain."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        await end(self._watching)

    def begin(self, role: Role, url: str) -> bool:
        """Drain the server at ``url``, and remove it when nobody needs it. False if it is not in the pool.

        ``Pool.add`` takes it back. Raises ``LastWorker`` for the only one of its role that takes work.
        """
        workers = self._pool.at(role, url)
        if any(not worker.draining for worker in workers):
            if not self._others(role, url):
                raise LastWorker(f"{url} is the only {role} worker that takes work")
            self._hurried.discard((role, url))
            self._quiet_since.pop((role, url), None)
            log.info("worker is drained: no new work for it", worker=url, role=role)
        return self._pool.drain(role, url)

    def hurry(self, role: Role, url: str) -> None:
        """Do not wait for what a server that drains retains: release it, and what comes to it meanwhile."""
        self._hurried.add((role, url))

    async def look(self) -> None:
        """One look at all that drain."""
        draining = {(worker.role, worker.url) for role in Role for worker in self._pool.all(role) if worker.draining}
        self._hurried &= draining
        self._quiet_since = {server: since for server, since in self._quiet_since.items() if server in draining}
        for server in draining:
            if server in self._hurried:
                await self._release(*server)
            if not self._is_quiet(*server):
                self._quiet_since.pop(server, None)
            elif self._clock() - self._quiet_since.setdefault(server, self._clock()) >= self._quiet_for:
                await self._remove(*server)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("looking after workers that drain failed; tried again")
            await asyncio.sleep(self._interval)

    def _others(self, role: Role, url: str) -> list[Worker]:
        """Those that take over the work of the server at ``url``."""
        return [worker for worker in self._pool.all(role) if worker.url != url and not worker.draining]

    def _is_quiet(self, role: Role, url: str) -> bool:
        """Whether no leg of this process needs it, and nothing of a conversation is known to be on it."""
        return self._pool.at_rest(role, url) and not (role is Role.DECODE and self._retained(url))

    def _retained(self, url: str) -> list[tuple[str, str]]:
        """Worker and key of all that the server keeps."""
        workers = self._pool.at(Role.DECODE, url)
        return [(worker.name, key) for worker in workers for key in self._ledger.on(worker.name, worker.generation)]

    async def _remove(self, role: Role, url: str) -> None:
        """Unless another replica has left something there, or those that are to do its work are not up yet."""
        await self._ledger.look(self._memory.scan())
        others = self._others(role, url)
        useful = any(worker.up for worker in self._pool.at(role, url))
        if self._is_quiet(role, url) and others and (any(worker.up for worker in others) or not useful):
            await self._pool.remove(role, url)

    async def _release(self, role: Role, url: str) -> None:
        """Have everything freed that the server keeps, so that no turn can use it any more."""
        if role is not Role.DECODE:
            return
        await self._ledger.look(self._memory.scan())
        retained = self._retained(url)
        for begin in range(0, len(retained), _AT_ONCE):
            taken = [await self._take(worker, key) for worker, key in retained[begin : begin + _AT_ONCE]]
            releases = [self._releaser.release_record(record, Why.DRAINED) for record in taken if record is not None]
            if under_way := [release for release in releases if release is not None]:
                await asyncio.wait(under_way)

    async def _take(self, worker: str, key: str) -> Record | None:
        """The entry, if it still is one of ``worker``'s."""
        record = await self._memory.take(key)
        if not isinstance(record, Record):
            return None
        if record.worker != worker:
            # Its conversation moved on since.
            await put_back(self._memory, self._releaser, key, record)
            return None
        return record

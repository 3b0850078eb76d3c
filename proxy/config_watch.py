"""The config file while the proxy runs: workers that come and go in it come and go in the pool."""

import asyncio
from pathlib import Path

import structlog
from watchfiles import awatch

from proxy.background import end
from proxy.departures import Departures
from proxy.pool import LastWorker, Pool
from proxy.settings import Settings
from proxy.settings_load import WrongSettings, load
from router.workers import Role

log = structlog.get_logger()

_LOOK_MILLISECONDS = 10_000
"""Between two looks where nothing tells of changes: network file systems, a link to a file in another folder."""

_PAUSE = 10.0
"""Seconds after which a watch that failed is begun again."""


class ConfigWatch:
    """Has the pool follow the file. Only what changes in the file is changed in the pool.

    So what ``/admin/workers`` did in between stays.
    """

    def __init__(self, path: Path, settings: Settings, pool: Pool, departures: Departures) -> None:
        """``settings`` are those that the proxy runs with, from a ``path`` that may have changed already."""
        self._path = path
        self._running = settings
        self._last = settings
        self._content: bytes | None = None
        self._pool = pool
        self._departures = departures
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        for role in Role:
            if self._running.beyond_the_file(role):
                log.info("the config file has no say in these workers: an option or a variable names them", role=role)
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        await end(self._watching)

    async def _watch(self) -> None:
        while True:
            try:
                await self._follow()
            except Exception:
                log.exception("watching the config file failed; tried again", file=str(self._path))
            await asyncio.sleep(_PAUSE)

    async def _follow(self) -> None:
        # The folder, since editors and Kubernetes put another file, or another link, in the old one's place.
        changes = awatch(
            self._path.parent,
            recursive=False,
            watch_filter=None,
            rust_timeout=_LOOK_MILLISECONDS,
            yield_on_timeout=True,
        )
        # It may have changed since it was read; a process that takes a dead one's place begins with what that had.
        await self.look()
        async for _ in changes:
            await self.look()

    async def look(self) -> None:
        """Read the file, and do what it says if that is something else than the last time."""
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
        except OSError:
            # Reading it again tells, in the words of every other fault in it.
            content = b""
        if content == self._content:
            return
        self._content = content
        try:
            found = await asyncio.to_thread(load, self._last.arguments)
        except WrongSettings as error:
            log.error("the config file is wrong: all stays as it was", detail=str(error))
            return
        before, self._last = self._last, found
        waiting = [
            name
            for name in Settings.model_fields
            if name not in tuple(Role) and getattr(found, name) != getattr(self._running, name)
        ]
        waiting += [role.value for role in Role if self._change(role, before, found)]
        if waiting:
            log.warning("changes in the config file wait for a restart", settings=waiting)

    def _change(self, role: Role, before: Settings, now: Settings) -> bool:
        """Add what is new, then drain what is gone; whether a worker that is there is to be another than it is."""
        old = {spec.url: spec for spec in getattr(before, role)}
        new = {spec.url: spec for spec in getattr(now, role)}
        for url, spec in new.items():
            if url not in old:
                log.info("worker was added to the config file", worker=url, role=role)
                self._pool.add(role, spec)
        for url in old.keys() - new.keys():
            try:
                self._departures.begin(role, url)
            except LastWorker:
                log.warning("worker is not in the config file any more, but stays: no other takes work", worker=url)
        return any(self._pool.spec(role, url) not in (None, spec) for url, spec in new.items())

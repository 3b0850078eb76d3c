"""A store whose answers come late."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from metadata_store import Absent, Record
from metadata_store.memory import MemoryStore
from metadata_store.redis import RedisStore
from proxy.interruption import Cause, Interruption
from tests.running import GENEROUS


class SlowTakes:
    """A store whose takes have been done at once, and whose answers come late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[MemoryStore] | type[RedisStore]) -> None:
        self.slow = False
        self._taken, self._go_on, self._noticed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        take, interrupt = kind.take, Interruption.interrupt

        async def taken_late(store: Any, key: str) -> Record | Absent:
            got = await take(store, key)
            if self.slow and isinstance(got, Record):
                self._taken.set()
                await self._go_on.wait()
            return got

        def noticed(interruption: Interruption, cause: Cause) -> None:
            interrupt(interruption, cause)
            self._noticed.set()

        monkeypatch.setattr(kind, "take", taken_late)
        monkeypatch.setattr(Interruption, "interrupt", noticed)

    async def outlast(self, asking: asyncio.Task[httpx.Response]) -> None:
        """Let the client of ``asking`` leave while an entry that was taken is on its way."""
        await asyncio.wait_for(self._taken.wait(), GENEROUS)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(self._noticed.wait(), GENEROUS)
        self.go_on()

    def go_on(self) -> None:
        """No take is late any more."""
        self.slow = False
        self._go_on.set()

"""The interface of a store: conversation → what decode holds for it."""

from collections.abc import AsyncIterator
from enum import Enum
from typing import Protocol

from metadata_store.record import Holding, LastTurn, Put, Record


class Absent(Enum):
    """Why ``take`` found nothing."""

    NOTHING = "nothing"
    """Never stored, discarded, or taken by another turn."""
    EXPIRED = "expired"
    """It was there and nobody took it before its deadline. Told once, for an hour at most."""


class StoreError(Exception):
    """The store could not be asked, or gave no sense. What was asked for may or may not have happened."""


class NotAsked(StoreError):
    """There was no connection to ask over: what was asked for has surely not happened, and will not."""


class UnreadableEntry(StoreError):
    """The store is well, but what it has under this key is not of this version. It is gone now."""


class Store(Protocol):
    """Entries by key. A key is opaque (``metadata_store.keys``); at most one entry per key.

    An entry ceases to exist at its deadline, without anybody asking. Every call may raise ``StoreError``.
    """

    async def open(self) -> None:
        """Make ready for use. Does not fail for a server that is down."""

    async def close(self) -> None:
        """Give back connections."""

    async def take(self, key: str) -> Record | Absent:
        """Remove the entry and return it. Of concurrent calls exactly one gets it."""

    async def put(self, key: str, record: Record) -> Put:
        """Store ``record``, which also is the conversation's last turn now; what was there before is returned."""

    async def note_turn(self, key: str, last: LastTurn) -> LastTurn | None:
        """Of a turn that leaves no entry: it is the conversation's last now; the one before it is returned."""

    async def restore(self, key: str, record: Record) -> bool:
        """Put back what ``take`` gave, unless a newer entry has come meanwhile; whether it was put back."""

    async def discard(self, key: str) -> Record | None:
        """Remove all that is known of the conversation; its entry is returned."""

    def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """All entries there are, in short, in no order; of those that come or go meanwhile some may be missing."""


TOMBSTONE_SECONDS = 3600.0
"""How long after a deadline ``take`` can still tell that an entry had expired."""

LAST_TURN_SECONDS = 3600.0
"""How long after its end a conversation's last turn is known, whatever becomes of its entry."""

"""Conversation → what decode holds for it. ``open_store`` makes the store that a URL names."""

import time
from collections.abc import Callable

from metadata_store import connections
from metadata_store.base import Absent, NotAsked, Store, StoreError, UnreadableEntry
from metadata_store.memory import MemoryStore
from metadata_store.record import Holding, LastTurn, Put, Record
from metadata_store.redis import RedisStore

__all__ = [
    "MEMORY",
    "Absent",
    "Holding",
    "LastTurn",
    "NotAsked",
    "Put",
    "Record",
    "Store",
    "StoreError",
    "UnreadableEntry",
    "open_store",
]

MEMORY = "memory://"
"""URL of the store in this process."""


def open_store(url: str, timeout: float, clock: Callable[[], float] = time.time) -> Store:
    """The store at ``url``: ``memory://``, or a Redis URL. Raises ``ValueError`` for any other.

    ``timeout`` in seconds bounds every call; ``clock`` tells the seconds since the epoch.
    """
    if url == MEMORY:
        return MemoryStore(clock)
    if url.startswith(connections.SCHEMES):
        return RedisStore(url, timeout, clock)
    # Not quoted in full: it may have a password in it.
    scheme = f"{url.partition('://')[0]}://" if "://" in url else repr(url)
    raise ValueError(f"{scheme} is neither memory:// nor a Redis URL ({', '.join(connections.SCHEMES)})")

"""The store in Redis: shared by all replicas.

Per conversation two keys, tied to one cluster slot: the entry, which Redis drops at the deadline, and
a note of what the entry holds and until when. The note outlives the entry, so that "expired" can be told
from "never there"; and it is short, so that all notes can be looked through every few seconds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from metadata_store.base import TOMBSTONE_SECONDS, Absent, StoreError, UnreadableEntry
from metadata_store.record import (
    Holding,
    Record,
    UnreadableRecord,
    decode,
    decode_holding,
    encode,
    encode_holding,
)

_PREFIX = "turnback:"
_NOTE = ":note"
_AT_ONCE = 200
"""Keys looked at in one round trip."""

_Answer = TypeVar("_Answer")


class RedisStore:
    """Entries in a Redis server (6.2 or newer)."""

    def __init__(self, url: str, timeout: float, clock: Callable[[], float] = time.time) -> None:
        """``url`` as redis-py takes it; ``timeout`` in seconds bounds every call.

        Raises ``ValueError`` for a URL that is none.
        """
        self._timeout = timeout
        self._clock = clock
        self._redis = Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            health_check_interval=30,
            # A command whose answer was lost may have been done: a ``put`` sent again would displace itself,
            # and the caller release what it has just stored.
            retry=Retry(NoBackoff(), 0),
        )
        _check_options(self._redis)

    async def open(self) -> None:
        """Nothing to make ready: connections are made when needed, since the server may come later."""

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def take(self, key: str) -> Record | Absent:
        """See ``Store.take``: GETDEL is atomic."""
        entry, note = await self._remove(key)
        if entry is not None:
            return _decoded(entry)
        if note is not None and _noted(note).deadline <= self._clock():
            return Absent.EXPIRED
        return Absent.NOTHING

    async def put(self, key: str, record: Record) -> Record | None:
        """See ``Store.put``."""
        left, entry_key, note_key = self._places(key, record)
        note = encode_holding(Holding.of(record))

        async def ask() -> bytes | None:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(entry_key, encode(record), px=left, get=True)
                pipe.set(note_key, note, px=left + _milliseconds(TOMBSTONE_SECONDS))
                before, _ = await pipe.execute()
                return before  # type: ignore[no-any-return]

        displaced = await self._bounded(ask)
        return None if displaced is None else _decoded(displaced)

    async def restore(self, key: str, record: Record) -> bool:
        """See ``Store.restore``."""
        if record.deadline <= self._clock():
            return False
        left, entry_key, note_key = self._places(key, record)
        note = encode_holding(Holding.of(record))

        async def ask() -> bool:
            async with self._redis.pipeline(transaction=False) as pipe:
                # Not NX together with GET, which Redis knows from 7.0 on only.
                pipe.set(entry_key, encode(record), px=left, nx=True)
                pipe.set(note_key, note, px=left + _milliseconds(TOMBSTONE_SECONDS), nx=True)
                done, _ = await pipe.execute()
                return bool(done)

        return await self._bounded(ask)

    async def discard(self, key: str) -> Record | None:
        """See ``Store.discard``."""
        entry, _ = await self._remove(key)
        return None if entry is None else _decoded(entry)

    async def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """See ``Store.scan``; each step is bounded in time, the whole is not. Unreadable notes are passed over."""
        notes = self._redis.scan_iter(match=f"{_PREFIX}*{_NOTE}", count=_AT_ONCE)
        more = True
        while more:
            keys = await self._bounded(lambda: _some(notes, _AT_ONCE))
            more = len(keys) == _AT_ONCE
            for key, note in zip(keys, await self._bounded(partial(self._get, keys)), strict=True):
                try:
                    holding = decode_holding(note) if note is not None else None
                except UnreadableRecord:
                    continue
                # A note without an entry is one that expired: taking removes both.
                if holding is not None and holding.deadline > self._clock():
                    yield key.decode().removeprefix(_PREFIX + "{").removesuffix("}" + _NOTE), holding

    async def _get(self, keys: list[bytes]) -> list[bytes | None]:
        """The values of ``keys``, one by one in one go: a cluster has them in different places."""
        if not keys:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.get(key)
            return list(await pipe.execute())

    async def _remove(self, key: str) -> tuple[bytes | None, bytes | None]:
        """Remove entry and note; what they were."""
        entry_key, note_key = _keys(key)

        async def ask() -> tuple[bytes | None, bytes | None]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.getdel(entry_key)
                pipe.getdel(note_key)
                entry, note = await pipe.execute()
                return entry, note

        return await self._bounded(ask)

    def _places(self, key: str, record: Record) -> tuple[int, str, str]:
        """Milliseconds that ``record`` has left; where it and its note go."""
        return max(1, _milliseconds(record.deadline - self._clock())), *_keys(key)

    async def _bounded(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        try:
            async with asyncio.timeout(self._timeout):
                return await ask()
        except TimeoutError as error:
            raise StoreError(f"Redis did not answer within {self._timeout} s") from error
        except (RedisError, OSError) as error:
            raise StoreError(_said(error)) from error


def _keys(key: str) -> tuple[str, str]:
    # The braces make both keys of a conversation live in one slot of a Redis Cluster.
    return f"{_PREFIX}{{{key}}}:entry", f"{_PREFIX}{{{key}}}{_NOTE}"


async def _some(keys: AsyncIterator[bytes], most: int) -> list[bytes]:
    """The next keys, at most so many; fewer only at the end."""
    found: list[bytes] = []
    async for key in keys:
        found.append(key)
        if len(found) == most:
            break
    return found


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _decoded(data: bytes) -> Record:
    try:
        return decode(data)
    except UnreadableRecord as error:
        raise UnreadableEntry(f"an entry in Redis is not readable: {error}") from error


def _noted(note: bytes) -> Holding:
    try:
        return decode_holding(note)
    except UnreadableRecord as error:
        raise StoreError("a note in Redis is not readable") from error


def _check_options(redis: "Redis") -> None:
    """Raises ``ValueError`` for options in the URL that would make every call fail."""
    pool = redis.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, AttributeError, RedisError) as error:
        raise ValueError(f"a Redis URL with an option that is none: {error}") from error
    if pool.connection_kwargs.get("decode_responses"):
        raise ValueError("a Redis URL must not set decode_responses: entries are no text")


def _said(error: BaseException) -> str:
    # redis-py quotes the whole command, entry and all.
    return f"Redis: {type(error).__name__}: {str(error)[:200]}"

"""The store in Redis: shared by all replicas.

Per conversation three keys, tied to one cluster slot: the entry, which Redis drops at the deadline; a note of what
the entry holds and until when, which outlives it, so that "expired" can be told from "never there", and is short, so
that all notes can be looked through every few seconds; and the last turn, which is only counted by.

What is done in one step is a script (``metadata_store.scripts``). With one server, or the master that Sentinels
name, all calls go over one connection (``metadata_store.pipeline``); in a cluster, and for the looking through, by
redis-py's own ways.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from metadata_store import connections, scripts
from metadata_store.base import LAST_TURN_SECONDS, TOMBSTONE_SECONDS, Absent, NotAsked, StoreError, UnreadableEntry
from metadata_store.pipeline import NoConnection, Pipeline, begins_with
from metadata_store.record import (
    Holding,
    LastTurn,
    Put,
    Record,
    UnreadableRecord,
    decode,
    decode_holding,
    decode_last_turn,
    encode,
    encode_holding,
    encode_last_turn,
)

_PREFIX = "turnback:"
_NOTE = ":note"
_LAST_TURN = ":last"
_AT_ONCE = 200
"""Keys looked at in one round trip."""

_ALLOWED = (
    f"~{_PREFIX}* +eval +info +get +set +getdel +scan +ping +select, in a cluster also +cluster|slots +command +asking"
)
"""As ACL SETUSER takes it."""
_NOT_ALLOWED = ("can't run this command", "can't access at least one of the keys", "ACL failure")

_Answer = TypeVar("_Answer")


class RedisStore:
    """Entries in a Redis server (6.2 or newer), the master of a service, or a cluster."""

    def __init__(self, url: str, timeout: float, clock: Callable[[], float] = time.time) -> None:
        """``url`` as ``connections`` has it; ``timeout`` in seconds bounds every call.

        Raises ``ValueError`` for a URL that is none.
        """
        self._timeout = timeout
        self._clock = clock
        self._redis = connections.client_for(url, timeout)
        one = self._redis if isinstance(self._redis, Redis) else None
        self._pipeline = None if one is None else Pipeline(one.connection_pool, timeout)
        # From anywhere: whatever mixes up connections mixes up those of several routers.
        self._words = count(secrets.randbits(48))

    async def open(self) -> None:
        """Nothing to make ready: connections are made when needed, since the server may come later."""

    async def close(self) -> None:
        """Close all connections. Does not fail, whatever becomes of them."""
        if self._pipeline is not None:
            await self._pipeline.close()
        await connections.close(self._redis)

    async def take(self, key: str) -> Record | Absent:
        """See ``Store.take``: the script is atomic."""
        life, entry, note = await self._run(scripts.REMOVE, key)
        if (record := self._alive(entry, life)) is not None:
            return record
        holding = _noted(note, life)
        return Absent.EXPIRED if holding is not None and holding.deadline <= self._clock() else Absent.NOTHING

    async def put(self, key: str, record: Record) -> Put:
        """See ``Store.put``."""
        last = encode_last_turn(LastTurn.of(record)), _milliseconds(LAST_TURN_SECONDS)
        life, displaced, before = await self._run(scripts.PUT, key, *self._written(record), *last)
        return Put(self._alive(displaced, life), _last_turn(before))

    async def note_turn(self, key: str, last: LastTurn) -> LastTurn | None:
        """See ``Store.note_turn``."""
        written = encode_last_turn(last), _milliseconds(LAST_TURN_SECONDS)
        (before,) = await self._run(scripts.NOTE_TURN, key, *written)
        return _last_turn(before)

    async def restore(self, key: str, record: Record) -> bool:
        """See ``Store.restore``. Whoever took an entry has the only one: it may go back into a later life."""
        if record.deadline <= self._clock():
            return False
        (done,) = await self._run(scripts.RESTORE, key, *self._written(record))
        return bool(done)

    async def discard(self, key: str) -> Record | None:
        """See ``Store.discard``."""
        life, entry = await self._run(scripts.DISCARD, key)
        return self._alive(entry, life)

    async def scan(self) -> AsyncIterator[tuple[str, Holding]]:
        """See ``Store.scan``; each step is bounded in time, the whole is not. Unreadable notes are passed over."""
        lives = await self._bounded(self._lives)
        notes = self._redis.scan_iter(match=f"{_PREFIX}*{_NOTE}", count=_AT_ONCE)
        more = True
        while more:
            keys = await self._bounded(lambda: _some(notes, _AT_ONCE))
            more = len(keys) == _AT_ONCE
            for key, note in zip(keys, await self._bounded(partial(self._get, keys)), strict=True):
                try:
                    holding = _holding(note, *lives)
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

    def _alive(self, value: bytes | None, life: bytes) -> Record | None:
        record = _decoded(value, life)
        # Redis counts from when it was told, a little later.
        return record if record is not None and record.deadline > self._clock() else None

    async def _lives(self) -> frozenset[bytes]:
        """Of the server, or of each master of a cluster."""
        redis: Any = self._redis
        told = await redis.execute_command("EVAL", scripts.TELL, 0, **connections.everywhere(redis))
        return frozenset(told.values() if isinstance(told, dict) else (told,))

    async def _run(self, script: str, key: str, *arguments: bytes | int) -> list[Any]:
        """What ``script`` returns for the keys of ``key``."""
        keys = _keys(key)
        word = b"%d" % next(self._words)
        # Sent whole each time: a few hundred bytes, where EVALSHA may need a second round trip, and a right.
        command = ("EVAL", script, len(keys), *keys, word, *arguments)
        if self._pipeline is not None:
            told = await self._told(self._pipeline.ask(*command, word=word))
        else:
            told = await self._bounded(partial(self._ask_cluster, keys[0], command))
            if not begins_with(word, told):
                raise StoreError("Redis: an answer to something else")
        return told[1:]  # type: ignore[no-any-return]

    async def _ask_cluster(self, key: str, command: tuple[str | bytes | int, ...]) -> Any:
        redis: Any = self._redis
        return await redis.execute_command(*command, **await connections.where(redis, key))

    def _written(self, record: Record) -> tuple[bytes, int, bytes, int]:
        """Entry and note of ``record``, each with the milliseconds for which Redis keeps it."""
        left = max(1, _milliseconds(record.deadline - self._clock()))
        return encode(record), left, encode_holding(Holding.of(record)), left + _milliseconds(TOMBSTONE_SECONDS)

    async def _bounded(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """What redis-py's client says, in time."""

        async def in_time() -> _Answer:
            async with asyncio.timeout(self._timeout):
                try:
                    return await ask()
                except (ReadOnlyError, MasterDownError):
                    await connections.look_again(self._redis)
                    raise
                except (RedisConnectionError, OSError):
                    # Those that idle are from before the same restart, and each of them would fail a call too.
                    await connections.drop_idle(self._redis)
                    raise

        return await self._told(in_time())

    async def _told(self, answer: Awaitable[_Answer]) -> _Answer:
        try:
            return await answer
        except TimeoutError as error:
            raise StoreError(f"Redis did not answer within {self._timeout} s") from error
        except NoConnection as error:
            raise NotAsked(_said(error.__cause__ or error)) from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise StoreError(_said(error)) from error


def _keys(key: str) -> tuple[str, str, str]:
    # The braces make all keys of a conversation live in one slot of a Redis Cluster.
    return f"{_PREFIX}{{{key}}}:entry", f"{_PREFIX}{{{key}}}{_NOTE}", f"{_PREFIX}{{{key}}}{_LAST_TURN}"


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


def _of_life(value: bytes, *lives: bytes) -> bytes | None:
    """What was written, None if in a life that is none of ``lives``. Raises ``UnreadableRecord``."""
    stamp, space, content = value.partition(b" ")
    if not space or not stamp.isalnum():
        raise UnreadableRecord("no life is told")
    return content if stamp in lives else None


def _decoded(value: bytes | None, life: bytes) -> Record | None:
    # An entry of another life must not be released either: it may have been read, and then its blocks are
    # somebody else's by now.
    try:
        content = None if value is None else _of_life(value, life)
        return None if content is None else decode(content)
    except UnreadableRecord as error:
        raise UnreadableEntry(f"an entry in Redis is not readable: {error}") from error


def _holding(note: bytes | None, *lives: bytes) -> Holding | None:
    content = None if note is None else _of_life(note, *lives)
    return None if content is None else decode_holding(content)


def _noted(note: bytes | None, life: bytes) -> Holding | None:
    try:
        return _holding(note, life)
    except UnreadableRecord as error:
        raise StoreError("a note in Redis is not readable") from error


def _last_turn(written: bytes | None) -> LastTurn | None:
    """None also for one of another version: nothing but a count is lost."""
    try:
        return None if written is None else decode_last_turn(written)
    except UnreadableRecord:
        return None


def _said(error: BaseException) -> str:
    # redis-py quotes the whole command, entry and all.
    said = f"Redis: {type(error).__name__}: {str(error)[:200]}"
    # Of what a script may not do, Redis tells in words only.
    if isinstance(error, NoPermissionError) or any(words in said for words in _NOT_ALLOWED):
        said += f"; the user must be allowed {_ALLOWED}"
    return said

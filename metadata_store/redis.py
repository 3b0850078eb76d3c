"""The store in Redis: shared by all replicas.

Per conversation three keys, tied to one cluster slot: the entry, which Redis drops at the deadline; a note of what
the entry holds and until when, which outlives it, so that "expired" can be told from "never there", and is short, so
that all notes can be looked through every few seconds; and the last turn, which is only counted by.

**What was taken never comes back.** Redis can fall back to an older state: it restarts from a snapshot or a log
that lacks the last second, or a replica that missed a removal becomes master. So entry and note are stamped
with the *life* in which they were written, and are not there in any other. A life is the replication history,
``master_replid`` of ``INFO replication``:

- A server draws a new one when it starts as a master and whenever it becomes master. So each life has one server,
  the one that drew it, and is over for good once that server ends or becomes a replica: what a master loads
  from disk, or copies from its own replica before it is master again, bears the stamp of a life that is over.
  (``run_id`` would not do: it is still the same when a master was demoted, copied an older state from its
  replica and was promoted again.)
- A replica shows its master's life; it is refused for its role, even if it was made writable.
- Within a life the server's state has one line of changes, and GETDEL ends an entry in it.

A script asks for the life and reads or writes in one step, so the life is that of the server that does the work,
at that moment: connections, fail-overs with two masters at once, and a cluster's nodes, of which each has
its own life and a redirected call is done as a whole elsewhere, need no book-keeping. A new life costs the
entries of the one before: those turns are served plain. So does moving a cluster's slots, and, in Redis, the coming
of the first replica. What makes two servers of one life is not seen: copying a running machine, or a key by hand.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from metadata_store import connections
from metadata_store.base import LAST_TURN_SECONDS, TOMBSTONE_SECONDS, Absent, NotAsked, StoreError, UnreadableEntry
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

_LIFE = """
local info = redis.pcall('INFO', 'replication')
if type(info) ~= 'string' then
    return redis.error_reply('NOPERM INFO is not allowed: ' .. (type(info) == 'table' and info.err or 'no answer'))
end
if not string.find(info, 'role:master', 1, true) then
    return redis.error_reply('READONLY this server is a replica')
end
local life = string.match(info, 'master_replid:(%w+)')
if not life then
    return redis.error_reply('NOPERM INFO does not tell master_replid')
end
"""
_REMOVE = f"{_LIFE} return {{life, redis.call('GETDEL', KEYS[1]), redis.call('GETDEL', KEYS[2])}}"
_DISCARD = f"""{_LIFE}
redis.call('GETDEL', KEYS[2])
redis.call('GETDEL', KEYS[3])
return {{life, redis.call('GETDEL', KEYS[1])}}
"""
_PUT = f"""{_LIFE}
local before = redis.call('SET', KEYS[1], life .. ' ' .. ARGV[1], 'PX', ARGV[2], 'GET')
redis.call('SET', KEYS[2], life .. ' ' .. ARGV[3], 'PX', ARGV[4])
return {{life, before, redis.call('SET', KEYS[3], ARGV[5], 'PX', ARGV[6], 'GET')}}
"""
_RESTORE = f"""{_LIFE}
local there = redis.call('GET', KEYS[1])
local stamp = there and string.match(there, '^(%w+) ')
if there and (not stamp or stamp == life) then
    return 0
end
redis.call('SET', KEYS[1], life .. ' ' .. ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], life .. ' ' .. ARGV[3], 'PX', ARGV[4])
return 1
"""
_TELL = f"{_LIFE} return life"

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

    async def open(self) -> None:
        """Nothing to make ready: connections are made when needed, since the server may come later."""

    async def close(self) -> None:
        """Close all connections."""
        await connections.close(self._redis)

    async def take(self, key: str) -> Record | Absent:
        """See ``Store.take``: the script is atomic."""
        life, entry, note = await self._run(_REMOVE, key)
        if (record := self._alive(entry, life)) is not None:
            return record
        holding = _noted(note, life)
        return Absent.EXPIRED if holding is not None and holding.deadline <= self._clock() else Absent.NOTHING

    async def put(self, key: str, record: Record) -> Put:
        """See ``Store.put``."""
        last = encode_last_turn(LastTurn.of(record)), _milliseconds(LAST_TURN_SECONDS)
        life, displaced, before = await self._run(_PUT, key, *self._written(record), *last)
        return Put(self._alive(displaced, life), _last_turn(before))

    async def note_turn(self, key: str, last: LastTurn) -> LastTurn | None:
        """See ``Store.note_turn``."""
        written = encode_last_turn(last)

        async def swap() -> Any:
            return await self._redis.set(_keys(key)[2], written, px=_milliseconds(LAST_TURN_SECONDS), get=True)

        return _last_turn(await self._bounded(swap))

    async def restore(self, key: str, record: Record) -> bool:
        """See ``Store.restore``. Whoever took an entry has the only one: it may go back into a later life."""
        if record.deadline <= self._clock():
            return False
        return bool(await self._run(_RESTORE, key, *self._written(record)))

    async def discard(self, key: str) -> Record | None:
        """See ``Store.discard``."""
        life, entry = await self._run(_DISCARD, key)
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
        told = await redis.execute_command("EVAL", _TELL, 0, **connections.everywhere(redis))
        return frozenset(told.values() if isinstance(told, dict) else (told,))

    async def _run(self, script: str, key: str, *arguments: bytes | int) -> Any:
        """What ``script`` returns for the keys of ``key``."""
        redis: Any = self._redis
        keys = _keys(key)

        async def ask() -> Any:
            # Sent whole each time: a few hundred bytes, where EVALSHA may need a second round trip.
            return await redis.execute_command(
                *("EVAL", script, len(keys), *keys, *arguments),
                **await connections.where(redis, keys[0]),
            )

        return await self._bounded(ask)

    def _written(self, record: Record) -> tuple[bytes, int, bytes, int]:
        """Entry and note of ``record``, each with the milliseconds for which Redis keeps it."""
        left = max(1, _milliseconds(record.deadline - self._clock()))
        return encode(record), left, encode_holding(Holding.of(record)), left + _milliseconds(TOMBSTONE_SECONDS)

    async def _bounded(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        try:
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
        except TimeoutError as error:
            raise StoreError(f"Redis did not answer within {self._timeout} s") from error
        except connections.NoConnection as error:
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

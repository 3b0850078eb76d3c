"""One connection to a Redis server, for all calls at once.

A call is sent when it is made, behind those before it, and answers come in the order of the calls. redis-py opens the
connection, with all that a URL can ask for (TLS, user and password, database, Sentinels), and hands it over:
by itself it takes ten times the instructions for a call, for its pool, a task to send, and three time-outs.

**No call gets another's answer.** Nothing but their order tells answers apart. So a connection is used only once it
has returned a random word: what came before that is no answer to a call. Who stops waiting leaves a place for the
answer that may still come. An answer that nobody asked for, or that is none, ends the connection.
"""

import asyncio
import math
import secrets
from collections import deque
from typing import Any

from hiredis import Reader, pack_command
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

_ANY_KEY = "turnback:"
_MORE = object()
_TOLD_APART: dict[str, type[ResponseError]] = {
    "READONLY": ReadOnlyError,
    "MASTERDOWN": MasterDownError,
    "NOPERM": NoPermissionError,
}


class NoConnection(RedisConnectionError):
    """None could be had, ``__cause__`` says why if it is known; so no command was sent."""


class Pipeline:
    """Calls to the server for which ``pool`` makes connections."""

    def __init__(self, pool: ConnectionPool, timeout: float) -> None:
        """``timeout`` in seconds bounds every call, connecting included."""
        self._pool = pool
        self._timeout = timeout
        self._link: _Link | None = None
        self._opening: asyncio.Task[_Link] | None = None

    async def ask(self, *command: str | bytes | int) -> Any:
        """What the server answers.

        Raises ``NoConnection``; after a ``TimeoutError`` or a ``RedisError`` the command may have been done.
        It is never sent twice.
        """
        now = asyncio.get_running_loop().time()
        link = self._link
        if link is None or not link.ready(now):
            link = await self._opened(now + self._timeout)
        return await link.ask(command, now + self._timeout)

    async def close(self) -> None:
        """Close the connection; calls on the way fail."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._link is not None:
            await self._link.close()

    async def _opened(self, deadline: float) -> "_Link":
        # One for all who wait, so that a server that does not answer costs them a time-out together, not in turn.
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._was_opened)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(self._opening)
        except TimeoutError:
            raise self._none_in_time() from None

    async def _open(self) -> "_Link":
        try:
            async with asyncio.timeout(self._timeout):
                if self._link is not None and await self._link.still_answers(self._timeout / 2):
                    return self._link
                connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
                await connection.connect()
                link = _Link(connection)
                await link.prove(self._timeout)
        except TimeoutError:
            raise self._none_in_time() from None
        except (RedisError, OSError) as error:
            raise NoConnection(str(error)) from error
        self._link = link
        return link

    def _none_in_time(self) -> NoConnection:
        return NoConnection(f"no connection within {self._timeout} s")

    def _was_opened(self, opening: "asyncio.Task[_Link]") -> None:
        self._opening = None
        if not opening.cancelled():
            # Nobody may be left whom it could be told.
            opening.exception()


class _Link(asyncio.Protocol):
    """The connection."""

    def __init__(self, connection: Any) -> None:
        """``connection`` is redis-py's, connected."""
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._transport: asyncio.Transport = connection._writer.transport
        self._before: Any = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._replies = Reader(protocolError=InvalidResponse, replyError=_reply_error, notEnoughData=_MORE)
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = False
        self._rest = connection.health_check_interval or math.inf
        self._heard = 0.0
        self._why = "it was closed"
        self._disconnecting: asyncio.Task[None] | None = None

    def ready(self, now: float) -> bool:
        """Whether it can be used as it is; not after a rest, in which something between may have forgotten it."""
        return now - self._heard < self._rest and not self._leaving and not self._transport.is_closing()

    def ask(self, command: tuple[str | bytes | int, ...], deadline: float) -> "asyncio.Future[Any]":
        """Send ``command``; raises ``NoConnection`` if it cannot. At ``deadline`` the answer is a ``TimeoutError``."""
        if self._transport.is_closing():
            raise NoConnection("it was lost")
        packed: Any = pack_command
        self._transport.write(packed(command))
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((deadline, answer))
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._look)
        return answer

    async def prove(self, timeout: float) -> None:
        """See that answers are those to what is asked. Raises ``RedisError`` or ``TimeoutError``; it is closed then."""
        word = secrets.token_hex(8).encode()
        try:
            if await self.ask(("EVAL", "return ARGV[1]", 1, _ANY_KEY, word), self._loop.time() + timeout) != word:
                raise InvalidResponse("another word came back than was sent")
        except BaseException:
            self._transport.abort()
            raise

    async def still_answers(self, timeout: float) -> bool:
        """Whether it can be used after a rest."""
        if self._leaving or self._transport.is_closing():
            return False
        try:
            await self.ask(("PING",), self._loop.time() + timeout)
        except (RedisError, OSError):
            return False
        return True

    async def close(self) -> None:
        """Close it; calls on the way fail."""
        self._transport.close()
        await self._connection.disconnect()
        if self._disconnecting is not None:
            await self._disconnecting

    def data_received(self, data: bytes) -> None:
        """Hand out the answers."""
        self._heard = self._loop.time()
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _MORE:
                _, answer = self._waiting.popleft()
                if isinstance(reply, ReadOnlyError | MasterDownError):
                    # Where that master was, may be another by now, or elsewhere.
                    self._leaving = True
                if answer.done():
                    continue
                if isinstance(reply, RedisError):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (InvalidResponse, IndexError):
            self._why = "what came is no answer to a call"
            self._transport.abort()
        if self._leaving and not self._waiting:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever was asked may have been done."""
        if self._timer is not None:
            self._timer.cancel()
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_exception(RedisConnectionError(f"the connection was lost: {exc or self._why}"))
        self._waiting.clear()
        self._before.connection_lost(exc)
        self._disconnecting = self._loop.create_task(self._connection.disconnect(nowait=True))

    def _look(self) -> None:
        """Give up on answers that are late; others that are on the way may still come, but nothing more is asked."""
        self._timer = None
        now = self._loop.time()
        for deadline, answer in self._waiting:
            if deadline <= now and not answer.done():
                answer.set_exception(TimeoutError())
                self._leaving = True
        left = [deadline for deadline, answer in self._waiting if not answer.done()]
        if left:
            self._timer = self._loop.call_at(min(left), self._look)
        elif self._leaving:
            self._transport.abort()


def _reply_error(said: str) -> ResponseError:
    kind = _TOLD_APART.get(said.partition(" ")[0], ResponseError)
    return kind(said)

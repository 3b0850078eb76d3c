"""One connection to a Redis server, for all calls at once.

A call is sent when it is made, behind those before it, and answers come in the order of the calls. redis-py opens the
connection, with all that a URL can ask for (TLS, user and password, database, Sentinels), and hands it over:
by itself it takes ten times the instructions for a call, for its pool, a task to send, and three time-outs.

**No call gets another's answer.** Answers are handed out by their order. So a connection is used only once it
has returned a random word: what came before that is no answer to a call. Who stops waiting leaves a place for the
answer that may still come. And a call can send a word with which its answer must begin: one that does not, one that
nobody asked for, and what is no answer at all (a push) end the connection, and nobody gets them.
"""

import asyncio
import math
import secrets
from collections import deque
from typing import Any

from hiredis import PushNotification, Reader, pack_command
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
_MOST_UNSENT = 64 * 1024 * 1024
"""Bytes."""
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
        self._links: list[_Link] = []
        """That one, and those before it that still have calls on the way."""
        self._opening: asyncio.Task[_Link] | None = None

    async def ask(self, *command: str | bytes | int, word: bytes | None = None) -> Any:
        """What the server answers: with ``word``, an array that begins with it.

        Raises ``NoConnection``, also when the server has left too much unread to be sent more; after a
        ``TimeoutError`` or a ``RedisError`` the command may have been done. It is never sent twice.
        """
        now = asyncio.get_running_loop().time()
        link = self._link
        if link is None or not link.ready(now):
            link = await self._opened(now + self._timeout)
        return await link.ask(command, now + self._timeout, word)

    async def close(self) -> None:
        """Break the connection off; calls on the way fail, those that wait for it with ``NoConnection``."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        for link in self._links:
            await link.close()

    async def _opened(self, deadline: float) -> "_Link":
        # One for all who wait, so that a server that does not answer costs them a time-out together, not in turn.
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._was_opened)
        opening = self._opening
        await asyncio.wait([opening], timeout=deadline - asyncio.get_running_loop().time())
        if not opening.done():
            raise self._none_in_time()
        if opening.cancelled():
            raise NoConnection("it was closed")
        return opening.result()

    async def _open(self) -> "_Link":
        try:
            async with asyncio.timeout(self._timeout):
                if self._link is not None:
                    if await self._link.still_answers(self._timeout / 2):
                        return self._link
                    self._link.leave()
                connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
                await connection.connect()
                link = _Link(connection)
                await link.prove(self._timeout)
        except TimeoutError:
            raise self._none_in_time() from None
        except (RedisError, OSError) as error:
            raise NoConnection(str(error)) from error
        self._link = link
        self._links = [*(one for one in self._links if not one.over), link]
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
        self._transport.set_write_buffer_limits(high=_MOST_UNSENT)
        self._full = False
        self._replies = Reader(protocolError=InvalidResponse, replyError=_reply_error, notEnoughData=_MORE)
        self._waiting: deque[tuple[float, asyncio.Future[Any], bytes | None]] = deque()
        """Until when, who, and the word with which the answer must begin."""
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = math.inf
        self._leaving = False
        self._rest = connection.health_check_interval or math.inf
        self._heard = 0.0
        self._why = "it was closed"
        self._lost = asyncio.Event()
        self._disconnecting: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing is left of it."""
        return self._lost.is_set()

    def ready(self, now: float) -> bool:
        """Whether it can be used as it is; not after a rest, in which something between may have forgotten it."""
        return now - self._heard < self._rest and not self._leaving and not self._transport.is_closing()

    def ask(
        self, command: tuple[str | bytes | int, ...], deadline: float, word: bytes | None = None
    ) -> "asyncio.Future[Any]":
        """Send ``command``; raises ``NoConnection`` if it cannot. At ``deadline`` the answer is a ``TimeoutError``."""
        if self._transport.is_closing():
            raise NoConnection("it was lost")
        if self._full:
            raise NoConnection("the server does not read what it is sent")
        packed: Any = pack_command
        self._transport.write(packed(command))
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((deadline, answer, word))
        if deadline < self._look_at:
            self._look_by(deadline)
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
            return bool(await self.ask(("PING",), self._loop.time() + timeout) == b"PONG")
        except (RedisError, OSError):
            return False

    def leave(self) -> None:
        """It is asked nothing more, and ends once nobody waits for an answer."""
        self._leaving = True
        if all(answer.done() for _, answer, _ in self._waiting):
            self._transport.abort()

    async def close(self) -> None:
        """Break it off; calls on the way fail. What is not sent yet would keep a close waiting for the server."""
        self._transport.abort()
        await self._lost.wait()
        if self._disconnecting is not None:
            await self._disconnecting

    def data_received(self, data: bytes) -> None:
        """Hand out the answers."""
        self._heard = self._loop.time()
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _MORE:
                _, answer, word = self._waiting[0]
                failed = isinstance(reply, RedisError)
                if type(reply) is PushNotification or not (failed or word is None or begins_with(word, reply)):
                    raise InvalidResponse("an answer to something else")
                self._waiting.popleft()
                if failed and isinstance(reply, ReadOnlyError | MasterDownError):
                    # Where that master was, may be another by now, or elsewhere.
                    self._leaving = True
                if answer.done():
                    continue
                if failed:
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
        for _, answer, _ in self._waiting:
            if not answer.done():
                answer.set_exception(RedisConnectionError(f"the connection was lost: {exc or self._why}"))
        self._waiting.clear()
        self._before.connection_lost(exc)
        self._disconnecting = self._loop.create_task(self._connection.disconnect(nowait=True))
        self._lost.set()

    def pause_writing(self) -> None:
        """The server does not read: in time its calls fail, but until then they must not fill the memory."""
        self._full = True

    def resume_writing(self) -> None:
        """It reads again."""
        self._full = False

    def _look_by(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = deadline
        self._timer = self._loop.call_at(deadline, self._look)

    def _look(self) -> None:
        """Give up on answers that are late; others that are on the way may still come, but nothing more is asked."""
        self._look_at = math.inf
        now = self._loop.time()
        for deadline, answer, _ in self._waiting:
            if deadline <= now and not answer.done():
                answer.set_exception(TimeoutError())
                self._leaving = True
        left = [deadline for deadline, answer, _ in self._waiting if not answer.done()]
        if left:
            self._look_by(min(left))
        elif self._leaving:
            self._transport.abort()


def begins_with(word: bytes, reply: Any) -> bool:
    """Whether ``reply`` is the answer to the call that sent ``word``."""
    return type(reply) is list and bool(reply) and reply[0] == word


def _reply_error(said: str) -> ResponseError:
    kind = _TOLD_APART.get(said.partition(" ")[0], ResponseError)
    return kind(said)

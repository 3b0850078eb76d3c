"""A load generator: so many clients, each with a connection of its own and one turn at a time."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from bench.failure import BenchFailure
from bench.overhead.answers import params
from bench.overhead.prompts import ANSWER_PIECES, Ask
from deploy.local.ports import LOOPBACK

_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"X-Conversation-Id: c%d\r\nContent-Length: %d\r\n\r\n"
)
_ENDS = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Order:
    """One turn that a client takes."""

    ask: Ask
    conversation: int
    outcome: bytes
    """What the router must say of reuse; nothing if it says nothing."""


@dataclass(slots=True)
class Answer:
    """One answer."""

    head: bytes
    body: bytes
    """As it came, chunked if it streamed."""
    first: float
    """When the first of the body came, by ``time.perf_counter``."""

    @property
    def data(self) -> bytes:
        """The body itself."""
        return _dechunked(self.body) if b"chunked" in self.head.lower() else self.body


@dataclass
class Times:
    """Of turns, in seconds."""

    turns: array[float] = field(default_factory=lambda: array("d"))
    firsts: array[float] = field(default_factory=lambda: array("d"))
    """To the first bytes of the answer's body."""
    elapsed: float = 0.0
    """For all of them together."""


class Connection(asyncio.Protocol):
    """One connection to a server; one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._done: Callable[[Answer | None], None] | None = None
        self._body = 0
        self._length: int | None = None
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, conversation: int, body: bytes, done: Callable[[Answer | None], None]) -> None:
        """Send a request; ``done`` gets its answer, or None if the connection ended before that."""
        self._done = done
        self._buffer = bytearray()
        self._body, self._first = 0, 0.0
        self._transport.writelines((_HEAD % (conversation, len(body)), body))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if not self._body:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body = end + 4
            self._length = _length(bytes(buffer[: end + 2]))
        if not self._first and len(buffer) > self._body:
            self._first = time.perf_counter()
        length = self._length
        if buffer.endswith(_ENDS) if length is None else len(buffer) >= self._body + length:
            self._end(Answer(bytes(buffer[: self._body]), bytes(buffer[self._body :]), self._first))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(None)

    def close(self) -> None:
        """Close it."""
        self._done = None
        self._transport.close()

    def _end(self, answer: Answer | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(answer)


class Lane(Protocol):
    """One client's way to an answer."""

    def start(self, order: Order, done: Callable[[Answer | None], None]) -> None:
        """Take a turn."""

    def close(self) -> None:
        """Close its connections."""


class Routed:
    """Through a router."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, order: Order, done: Callable[[Answer | None], None]) -> None:
        """See ``Lane.start``."""
        self._connection.send(order.conversation, order.ask.body, done)

    def close(self) -> None:
        """See ``Lane.close``."""
        self._connection.close()


class Direct:
    """Without a router: the client sends both legs itself."""

    def __init__(self, prefill: Connection, decode: Connection) -> None:
        self._prefill = prefill
        self._decode = decode
        self._legs: dict[str, tuple[bytes, bytes]] = {}

    def start(self, order: Order, done: Callable[[Answer | None], None]) -> None:
        """See ``Lane.start``."""
        legs = self._legs.get(order.ask.mark)
        if legs is None:
            legs = self._legs[order.ask.mark] = _legs(order.ask)

        def prefilled(answer: Answer | None) -> None:
            if answer is None or b" 200 " not in answer.head[:16]:
                done(answer)
            else:
                self._decode.send(order.conversation, legs[1], done)

        self._prefill.send(order.conversation, legs[0], prefilled)

    def close(self) -> None:
        """See ``Lane.close``."""
        self._prefill.close()
        self._decode.close()


async def connect(port: int) -> Connection:
    """A connection to a server on loopback."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, LOOPBACK, port)
    return connection


async def run(lanes: Sequence[Lane], take: Callable[[], Order | None]) -> Times:
    """Have each lane take turns, as ``take`` gives them, until it gives none. Raises ``BenchFailure``."""
    times = Times()
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    busy = len(lanes)

    def begin(lane: Lane) -> None:
        nonlocal busy
        order = take()
        if order is None or over.done():
            busy -= 1
            if not busy and not over.done():
                over.set_result(None)
            return
        began = time.perf_counter()

        def done(answer: Answer | None) -> None:
            now = time.perf_counter()
            wrong = what_is_wrong(order, answer)
            if answer is None or wrong is not None:
                if not over.done():
                    over.set_exception(BenchFailure(wrong or "no answer"))
                return
            times.turns.append(now - began)
            times.firsts.append(answer.first - began)
            begin(lane)

        lane.start(order, done)

    started = time.perf_counter()
    for lane in lanes:
        begin(lane)
    await over
    times.elapsed = time.perf_counter() - started
    return times


def what_is_wrong(order: Order, answer: Answer | None) -> str | None:
    """What is wrong at first sight; None if nothing."""
    if answer is None:
        return "a connection was closed before its answer was complete"
    if not answer.head.startswith(b"HTTP/1.1 200 "):
        return f"{answer.head.splitlines()[0].decode()}: {answer.body[:300]!r}"
    if order.ask.streams:
        if b"[DONE]" not in answer.body[-32:]:
            return "a stream did not end with [DONE]"
    elif b"}" not in answer.body[-8:]:
        return "an answer is not all there"
    if order.outcome and b"\r\nx-turnback-reuse: %s\r\n" % order.outcome not in answer.head:
        said = next((line for line in answer.head.splitlines() if line.startswith(b"x-turnback-reuse")), b"nothing")
        return f"reuse should be {order.outcome.decode()}, and the router says {said.decode()}"
    return None


def check(order: Order, answer: Answer | None) -> None:
    """Read all of an answer. Raises ``BenchFailure`` if anything of it is not as the engine sent it to clients."""
    wrong = what_is_wrong(order, answer)
    if answer is None or wrong is not None:
        raise BenchFailure(wrong or "no answer")
    if order.ask.streams:
        events = [event[6:] for event in answer.data.split(b"\n\n") if event.startswith(b"data: {")]
        choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        text = msgspec.json.decode(answer.data)["choices"][0]["message"]["content"]
    if text != "".join(ANSWER_PIECES):
        raise BenchFailure(f"an answer has another text than the engine's: {text!r}")
    if order.outcome and any(told in answer.body for told in (b"kv_transfer_params", b"token_ids")):
        raise BenchFailure("an answer has what is private to router and engines")


def _legs(ask: Ask) -> tuple[bytes, bytes]:
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    prefill = ask.members | {"max_tokens": 1, "stream": False, "kv_transfer_params": first}
    decode = ask.members | {"kv_transfer_params": params("prefill", ask.tokens)}
    return msgspec.json.encode(prefill), msgspec.json.encode(decode)


def _length(head: bytes) -> int | None:
    small = head.lower()
    begin = small.find(b"content-length:")
    return None if begin < 0 else int(small[begin + 15 : small.index(b"\r", begin)])


def _dechunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    position = 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        position = end + size + 4

"""One request to a server, from its first byte to the last of its answer."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from proxy.connections import Connections, NoConnection
from proxy.errors import bad_request
from proxy.http_answer import HttpAnswer
from proxy.http_url import Address
from proxy.request_head import RequestHeads, UnsafeHeader
from proxy.wait import Wait
from proxy.worker_connection import Until, WorkerConnection
from proxy.worker_stream import Stream

_JSON = "application/json"


class Answer(msgspec.Struct, frozen=True):
    """A whole answer with status 2xx."""

    status: int
    content_type: str
    body: bytes


class Refused(msgspec.Struct, frozen=True):
    """The worker's own 4xx: the request is at fault, as far as it was looked at."""

    status: int
    content_type: str
    body: bytes


class Failed(msgspec.Struct, frozen=True):
    """No usable answer: 5xx, no connection, or no answer in time."""

    detail: str
    status: int | None = None
    """None if nothing came back at all."""
    sent: bool = True
    """Whether the worker may have got the request. Not if no connection was made."""


class Route:
    """What it takes to send requests to one server, and who waits for it."""

    def __init__(self, address: Address, connections: Connections, headers: Mapping[str, str]) -> None:
        self.connections = connections
        self.heads = RequestHeads(address, headers)
        self.waits: set[Wait] = set()
        self.streams: set[Stream] = set()


class Request(NamedTuple):
    """One that is to be written."""

    head: bytes
    body: bytes


class Sent(NamedTuple):
    """A request that was written."""

    connection: WorkerConnection
    answer: HttpAnswer
    on_kept: bool
    """Whether the connection had carried others before."""


Begun = Sent | Request | Refused | Failed


def begin(route: Route, request: Request) -> Sent | Request:
    """``request`` is sent if a connection waits for one.

    Before anything else is done for it: so the worker has it some microseconds earlier.
    """
    connection = route.connections.kept()
    return request if connection is None else Sent(connection, connection.ask(request.head, request.body), True)


async def _sent(route: Route, begun: Sent | Request, wait: Wait) -> Sent | Failed:
    """What is not sent yet is, on a connection of its own."""
    sent = await _sent_on_new(route, begun, wait) if isinstance(begun, Request) else begun
    if isinstance(sent, Sent):
        wait.on = sent.connection
    return sent


async def _sent_on_new(route: Route, request: Request, wait: Wait) -> Sent | Failed:
    try:
        async with wait.connecting():
            connection = await route.connections.opened()
    except NoConnection as error:
        return Failed(str(error), sent=False)
    except TimeoutError:
        return too_late(wait.seconds)
    if wait.over:
        # Stopped in the very moment in which it was made.
        route.connections.free(connection)
        return too_late(wait.seconds)
    return Sent(connection, connection.ask(request.head, request.body), False)


async def whole_answer(route: Route, begun: Begun, timeout: float) -> Answer | Refused | Failed:
    """All of the answer, within ``timeout`` seconds of now."""
    if isinstance(begun, Refused | Failed):
        return begun
    with Wait(timeout, route.waits) as wait:
        sent = await _sent(route, begun, wait)
        return await _whole(sent, wait) if isinstance(sent, Sent) else sent


async def repeatable_answer(route: Route, request: Request, timeout: float) -> Answer | Refused | Failed:
    """The whole answer to what only asks: sent again where a kept connection turns out to have been closed."""
    with Wait(timeout, route.waits) as wait:
        while not wait.over:
            sent = await _sent(route, begin(route, request), wait)
            if isinstance(sent, Failed):
                return sent
            result = await _whole(sent, wait)
            if not (sent.on_kept and sent.answer.unanswered):
                return result
    return too_late(timeout)


async def streamed_answer(
    route: Route, begun: Begun, first_byte_timeout: float, gap_timeout: float
) -> Answer | Stream | Refused | Failed:
    """The answer as it comes, if it is a stream; its first byte within ``first_byte_timeout`` seconds of now."""
    if isinstance(begun, Refused | Failed):
        return begun
    with Wait(first_byte_timeout, route.waits) as wait:
        sent = await _sent(route, begun, wait)
        if isinstance(sent, Failed):
            return sent
        if (failed := await _answered(sent, wait, Until.HEAD)) is not None:
            return failed
        connection, answer, _ = sent
        if answer.status < 300 and answer.content_type.partition(";")[0].strip().lower() == "text/event-stream":
            return Stream(connection, answer, gap_timeout, route.streams)
        wait.go_on(gap_timeout)
        return await _whole(sent, wait)


async def _answered(sent: Sent, wait: Wait, until: Until) -> Failed | None:
    """None when so much of the answer is there. If it is not to be, the connection is closed."""
    connection, answer, _ = sent
    try:
        while not (answer.over or answer.broken or wait.over or (until is Until.HEAD and answer.status)):
            await connection.more(until)
    except asyncio.CancelledError:
        if not answer.over:
            connection.drop(answer)
            raise
        # It came in the very moment of the cancellation, and may name what the worker keeps: it is not to be lost.
        _cancel_at_the_next_wait()
    if answer.broken:
        return Failed(f"the connection broke: {answer.broken}")
    if answer.over or (until is Until.HEAD and answer.status):
        return None
    connection.drop(answer)
    return Failed(_late(wait.seconds))


def _cancel_at_the_next_wait() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.cancel()
        # Whoever cancelled did so once.
        task.uncancel()


async def _whole(sent: Sent, wait: Wait) -> Answer | Refused | Failed:
    if (failed := await _answered(sent, wait, Until.END)) is not None:
        return failed
    answer = sent.answer
    content_type = answer.content_type or _JSON
    if answer.status < 300:
        return Answer(answer.status, content_type, answer.take())
    if 400 <= answer.status < 500:
        return Refused(answer.status, content_type, answer.take())
    # Not the body: it may quote the prompt.
    return Failed(f"status {answer.status}", answer.status)


def too_late(seconds: float) -> Failed:
    """Nothing was sent, and now it is too late for it."""
    return Failed(_late(seconds), sent=False)


def _late(seconds: float) -> str:
    return f"no answer within {seconds:g} s, or the worker went down"


def unsafe(error: UnsafeHeader) -> Refused:
    """What a worker would say if it were asked: no other would take it either."""
    return Refused(400, _JSON, bad_request(f"The request cannot be sent on: {error}.").body())

"""Decode's stream on its way to the client: event by event, each the moment it arrives."""

from collections.abc import AsyncIterator, Awaitable, Callable

from proxy.errors import broken_off
from proxy.harvest import Harvest
from proxy.upstream import BrokenOff, Stream

_END_OF_STREAM = b"[DONE]"


async def events(stream: Stream) -> AsyncIterator[bytes]:
    """The stream cut into its events, each with the empty line that ends it. Raises ``BrokenOff``.

    What follows the last empty line comes last, as it is.
    """
    rest = b""
    async for part in stream.parts():
        rest = rest + part if rest else part
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        while (end := rest.find(b"\n\n")) >= 0:
            yield rest[: end + 2]
            rest = rest[end + 2 :]
    if rest:
        yield rest


def cleaned(event: bytes, harvest: Harvest) -> bytes | None:
    """``event`` without what is private; None if nothing is left of it."""
    if not event.startswith(b"data:"):
        return event
    data = event[5:].strip()
    kept = harvest.take(data)
    if kept is data:
        return event
    return None if kept is None else b"data: " + kept + b"\n\n"


def is_end(event: bytes) -> bool:
    """Whether this is the event by which the API says that all has been said."""
    return event.startswith(b"data:") and event[5:].strip() == _END_OF_STREAM


async def relayed(
    first: bytes, following: AsyncIterator[bytes], harvest: Harvest, finish: Callable[[], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """What the client gets: ``first``, then what ``following`` brings, without what is private.

    ``finish`` runs before the end is told, so that a client which goes on at once finds its entry. A
    stream that breaks off ends with an error event and without the API's end, never as if complete.
    """
    finished = False
    try:
        if (kept := cleaned(first, harvest)) is not None:
            yield kept
        async for event in following:
            if is_end(event):
                finished = True
                await finish()
                yield event
            elif (kept := cleaned(event, harvest)) is not None:
                yield kept
    except BrokenOff as error:
        harvest.failed = True
        yield broken_off(str(error)).event()
        return
    if not finished:
        harvest.failed = True
        yield broken_off("decode closed the stream before its end").event()

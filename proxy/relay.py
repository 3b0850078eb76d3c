"""Decode's stream on its way to the client: event by event, each the moment it arrives."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import msgspec

from proxy.body import NotAnObject, parse, read
from proxy.errors import broken_off
from proxy.harvest import Harvest
from proxy.sse import data_of, is_end, with_data
from proxy.upstream import BrokenOff


def cleaned(event: bytes, harvest: Harvest) -> bytes | None:
    """``event`` without what is private; None if nothing is left of it."""
    data = data_of(event)
    if not data:
        return event
    kept = harvest.take(data)
    if kept is data:
        return event
    return None if kept is None else with_data(event, kept)


def names_role_only(event: bytes) -> bool:
    """Whether this is the chunk with which a chat begins, before any token: a role and no text."""
    if b'"role"' not in event:
        return False
    try:
        choices = read(parse(data_of(event)), "choices", list[_Opening])
    except NotAnObject:
        return False
    return bool(choices) and all(choice.says_nothing() for choice in choices or [])


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, msgspec.Raw]] | None = None


class _Opening(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None

    def says_nothing(self) -> bool:
        delta = self.delta
        if delta is None or self.finish_reason is not None:
            return False
        return not (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


async def relayed(
    first: Iterable[bytes], following: AsyncIterator[bytes], harvest: Harvest, finish: Callable[[], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """What the client gets: ``first``, then what ``following`` brings, without what is private.

    ``finish`` runs before the end is told, so that a client which goes on at once finds its entry. A
    stream that breaks off ends with an error event and without the API's end, never as if complete.
    """
    finished = False
    try:
        for event in first:
            if (kept := cleaned(event, harvest)) is not None:
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

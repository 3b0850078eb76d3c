"""Server-sent events, as far as they are read here: where one ends, and what it carries."""

from collections.abc import AsyncIterator

import msgspec

_DATA = b"data:"
_END_OF_STREAM = b"[DONE]"


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """A stream cut into its events, each with the empty line that ends it; together those that arrived together.

    An event that was not ended is passed on, ended, if it is all there; half an event is dropped: its reader could
    make no sense of it, nor of what comes after it.
    """
    rest = bytearray()
    async for part in parts:
        # The event's end may have come in two halves. Nothing else is looked at twice: the first event of a long
        # prompt has its ids in it, and comes in many parts.
        looked_at = max(0, len(rest) - 3)
        rest += part
        if b"\r" in part or b"\r" in rest[looked_at:]:
            rest = rest.replace(b"\r\n", b"\n")
            looked_at = 0
        begin, ended = 0, []
        while (end := rest.find(b"\n\n", max(begin, looked_at))) >= 0:
            ended.append(bytes(rest[begin : end + 2]))
            begin = end + 2
        # Cut once for each part: a slow reader finds megabytes of events in one.
        del rest[:begin]
        if ended:
            yield ended
    if rest and _is_whole(bytes(rest)):
        yield [bytes(rest).rstrip(b"\n") + b"\n\n"]


def data_of(event: bytes) -> bytes:
    """What an event carries; nothing for one of comments and other fields only."""
    if _is_data_only(event):
        return event[len(_DATA) :].strip()
    lines = [line[len(_DATA) :].strip() for line in event.split(b"\n") if line.startswith(_DATA)]
    return b"\n".join(lines)


def with_data(event: bytes, data: bytes) -> bytes:
    """``event`` carrying ``data`` instead; its comments and other fields stay in front."""
    if _is_data_only(event):
        return b"data: " + data + b"\n\n"
    others = [line for line in event.split(b"\n") if line and not line.startswith(_DATA)]
    return b"\n".join([*others, b"data: " + data]) + b"\n\n"


def is_end(event: bytes) -> bool:
    """Whether this is the event by which the API says that all has been said."""
    return _END_OF_STREAM in event and data_of(event) == _END_OF_STREAM


def _is_data_only(event: bytes) -> bool:
    return event.startswith(_DATA) and event.find(b"\n") == len(event) - 2


def _is_whole(rest: bytes) -> bool:
    data = data_of(rest)
    if data == _END_OF_STREAM:
        return True
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True

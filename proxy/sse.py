"""Server-sent events, as far as they are read here: where one ends, and what it carries."""

from collections.abc import Awaitable, Callable, Iterator

import msgspec

_DATA = b"data:"
_END_OF_STREAM = b"[DONE]"
_EVENT_END = b"\n\n"


class Events:
    """A stream's events, as they arrive."""

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        """``read``: the stream's next bytes, cut anywhere; nothing at its end."""
        self._read = read
        self._rest = bytearray()
        self._put_back = b""

    def put_back(self, events: bytes) -> None:
        """Have ``arrived`` give these next."""
        self._put_back = events

    async def arrived(self) -> bytes:
        """Those that arrived together, each with the empty line that ends it; nothing once there are no more.

        An event that was not ended is passed on, ended, if it is all there; half an event is dropped: its reader
        could make no sense of it, nor of what comes after it.
        """
        if self._put_back:
            events, self._put_back = self._put_back, b""
            return events
        while part := await self._read():
            if ended := self._ended_by(part):
                return ended
        rest, self._rest = bytes(self._rest), bytearray()
        return rest.rstrip(b"\n") + b"\n\n" if rest and _is_whole(rest) else b""

    def unread(self, part: bytes) -> bytes:
        """Those that nobody asked for yet, if ``part`` is what came last."""
        events, self._put_back = self._put_back, b""
        return events + self._ended_by(part)

    def _ended_by(self, part: bytes) -> bytes:
        # Nearly always whole events. A third newline would be the begin of the one that follows.
        if not self._rest and part.endswith((b"}\n\n", b"]\n\n")) and b"\r" not in part:
            return part
        # The event's end may have come in two halves. Nothing else is looked at twice: the first event of a long
        # prompt has its ids in it, and comes in many parts.
        looked_at = max(0, len(self._rest) - 3)
        self._rest += part
        if b"\r" in part or b"\r" in self._rest[looked_at:]:
            self._rest = self._rest.replace(b"\r\n", b"\n")
            looked_at = 0
        ended = 0
        while (end := self._rest.find(_EVENT_END, max(ended, looked_at))) >= 0:
            ended = end + len(_EVENT_END)
        events = bytes(self._rest[:ended])
        del self._rest[:ended]
        return events


def each(events: bytes) -> Iterator[bytes]:
    """One by one. What does not end with the empty line that ends an event is none."""
    begin = 0
    while (end := events.find(_EVENT_END, begin)) >= 0:
        yield events[begin : end + len(_EVENT_END)]
        begin = end + len(_EVENT_END)


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
    # Nearly all others are told apart without looking through them.
    return not event.startswith(b"data: {") and _END_OF_STREAM in event and data_of(event) == _END_OF_STREAM


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

"""A worker's answer that comes in parts, as it is read."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp

from proxy.gap import GapWatch


class BrokenOff(Exception):
    """A stream ended before its end: connection lost, or nothing came for too long."""


class Stream:
    """An answer that comes in parts. Must be closed; closing it early makes the engine stop."""

    def __init__(self, response: aiohttp.ClientResponse, gap_timeout: float, others: set["Stream"]) -> None:
        """``gap_timeout``: seconds. ``others`` are all open streams of the worker, this one among them until closed."""
        self.begun = asyncio.get_running_loop().time()
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "")
        self._response = response
        self._stalled = False
        self._gap = GapWatch(gap_timeout, self._stall)
        self._others = others
        others.add(self)

    def allow_gaps(self, seconds: float) -> None:
        """From now on there may be so many seconds between two parts."""
        self._gap.allow(seconds)

    async def parts(self) -> AsyncIterator[bytes]:
        """The bytes, in pieces as they arrive. Raises ``BrokenOff``."""
        content, gap = self._response.content, self._gap
        while True:
            gap.begin()
            try:
                part = await content.readany()
            except aiohttp.ClientError as error:
                # Of a closed response it is one and the same object for all: it would keep the frames of each of them.
                error.__traceback__ = None
                if self._stalled:
                    raise BrokenOff(f"the worker sent nothing for {gap.seconds:g} s") from error
                raise BrokenOff(f"the worker's connection broke: {type(error).__name__}") from error
            finally:
                gap.end()
            if not part:
                return
            yield part

    def is_over(self) -> bool:
        """Whether all was read."""
        return self._response.content.is_eof()

    def close(self) -> None:
        """Give the connection back if all was read, else close it."""
        self._gap.stop()
        self._others.discard(self)
        self._response.close() if not self.is_over() else self._response.release()

    def _stall(self) -> None:
        # Whoever waits for a part is told by the connection's end.
        self._stalled = True
        self._response.close()

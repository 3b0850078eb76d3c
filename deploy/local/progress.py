"""Say what is being waited for, and for how long.

On a terminal one line per step counts the seconds. Elsewhere (a log, CI) a step has a line when
it starts, one every `REMIND_SECONDS`, and one when it ends.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

REMIND_SECONDS = 30.0
REDRAW_SECONDS = 0.2


class Progress:
    """Steps on `stream` (standard error unless given), one at a time."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()

    def note(self, text: str) -> None:
        """One line, at once."""
        print(text, file=self._stream, flush=True)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show `title` and the time it takes until the block ends, and whether it failed."""
        started = time.monotonic()
        ended = threading.Event()
        if not self._live:
            self.note(f"{title} ...")
        ticker = threading.Thread(target=self._tick, args=(title, started, ended), daemon=True)
        ticker.start()
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            ended.set()
            ticker.join()
            took = time.monotonic() - started
            start_of_line = "\r\x1b[K" if self._live else ""
            self.note(f"{start_of_line}{title}: {outcome} ({took:.1f} s)")

    def _tick(self, title: str, started: float, ended: threading.Event) -> None:
        while not ended.wait(REDRAW_SECONDS if self._live else REMIND_SECONDS):
            took = time.monotonic() - started
            if self._live:
                print(f"\r\x1b[K{title} ... {took:.0f} s", end="", file=self._stream, flush=True)
            else:
                self.note(f"{title} ... {took:.0f} s so far")

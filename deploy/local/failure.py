"""What went wrong with something local, told with the end of its log."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 30


class LocalFailure(Exception):
    """Something local cannot be built, started or kept running. The text is for people."""

    def __init__(self, what: str, log: Path | None = None) -> None:
        self.log = log
        text = what
        if log is not None:
            text += f"\nLog: {log}"
            if end := tail(log):
                text += f"\nIts last lines:\n{end}"
        super().__init__(text)


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log, indented; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 400 * lines))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])

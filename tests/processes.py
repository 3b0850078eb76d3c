"""What runs, as /proc tells it. Whoever asks may be a moment late: a process that ends while it is read is gone."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended, and that nobody has waited for yet, does not."""
    return _read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def children(pid: int) -> set[int]:
    """Those that it started itself."""
    return {int(child) for child in _read(pid, f"task/{pid}/children").split()}


def command_line(pid: int) -> str:
    """The words of it, with a zero after each; nothing if it is gone."""
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # The second where it ends between the opening and the reading.
        return ""

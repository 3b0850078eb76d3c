"""Know whether something built is still what its inputs would build, and keep two builds apart."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# What builds leave behind in a source tree.
_NOT_SOURCE = {"__pycache__", "build", "dist"}


def source_files(directory: Path) -> list[Path]:
    """The files of a small project, sorted, without what builds leave behind."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file()
        and not any(
            part in _NOT_SOURCE or part.endswith(".egg-info") or part.startswith(".")
            for part in path.relative_to(directory).parts
        )
    )


def digest(files: Iterable[Path], *more: str) -> str:
    """A digest of the files' names and contents and of the strings."""
    sha = hashlib.sha256()
    for text in more:
        sha.update(f"{len(text)}:{text}".encode())
    for path in files:
        content = path.read_bytes()
        sha.update(f"{path.name}:{len(content)}:".encode())
        sha.update(content)
    return sha.hexdigest()


class Stamp:
    """A file that says which digest a thing was built from. Absent while it is being built."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def holds(self, digest: str) -> bool:
        try:
            return self._path.read_text(encoding="ascii").strip() == digest
        except FileNotFoundError:
            return False

    @contextmanager
    def replaced_by(self, digest: str) -> Iterator[None]:
        """Clear the stamp, and set it only if the block succeeds: an interrupted build has none."""
        self._path.unlink(missing_ok=True)
        yield
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(digest + "\n", encoding="ascii")


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold `lock` against other processes; wait for whoever holds it. Dropped if we die."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""Files of which each line is one JSON value; what is wrong is said with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.failure import BenchFailure

T = TypeVar("T")


def lines(path: Path, of: type[T]) -> Iterator[tuple[int, T]]:
    """Each line's number and value; empty lines are passed over. Raises ``BenchFailure``."""
    decode = msgspec.json.Decoder(of).decode
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield number, decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BenchFailure(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise BenchFailure(f"cannot read {path}: {error.strerror}") from error

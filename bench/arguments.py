"""Command line arguments that several benches take."""

from __future__ import annotations

import argparse
from pathlib import Path


def file_to_write(text: str) -> Path:
    """A file for results. That its folder is not there is told before the run, not after it."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder, or it is one")
    return path

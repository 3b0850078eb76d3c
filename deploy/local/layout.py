"""Where the local pair keeps what it builds and writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one directory, `.local` of the checkout unless `TURNBACK_LOCAL` names another."""

    directory: Path

    @classmethod
    def default(cls) -> Layout:
        return cls(Path(os.environ.get("TURNBACK_LOCAL") or PROJECT / ".local").resolve())

    @property
    def engine(self) -> Path:
        """The engines' virtual environment."""
        return self.directory / "engine"

    @property
    def engine_python(self) -> Path:
        return self.engine / "bin" / "python"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def lock(self) -> Path:
        """Held while anything below is built."""
        return self.directory / "setup.lock"

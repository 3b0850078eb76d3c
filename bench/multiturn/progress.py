"""How far a run has come, on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.result import TurnResult


class RunProgress:
    """A bar on standard error; of a file or a pipe only what is said."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._errors = self._reused = self._later = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, highlight=False, markup=False)

    def phase(self, name: str, turns: int) -> None:
        """What comes now: ``turns`` answers."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=turns, said="")
        self._errors = self._reused = self._later = 0
        if not self._console.is_terminal:
            self.say(f"{name} …")

    def turn(self, result: TurnResult) -> None:
        """One more is over."""
        self._errors += result.error is not None
        if result.outcome not in (None, "off") and result.turn > 1:
            self._later += 1
            self._reused += result.reused
        said = f"reused {self._reused} of {self._later} later turns" if self._later else ""
        if self._errors:
            said += f"{', ' if said else ''}{self._errors} errors"
        if self._task is not None:
            self._bar.update(self._task, advance=1, said=said)

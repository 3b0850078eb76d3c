"""Where the processes of a measurement run, and what they have used."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.failure import BenchFailure
from deploy.local.layout import PROJECT
from deploy.local.process import Process

_CPUCLOCK_SCHED = 2
"""Of the kernel's numbers for the clocks of other processes: time spent running, all threads together."""


@dataclass(frozen=True)
class Cores:
    """The router has one for itself, if there are two; everything else shares the other."""

    router: int
    others: int

    @classmethod
    def of_this_machine(cls) -> Cores:
        """Two of those that this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[1] if len(allowed) > 1 else allowed[0])

    @property
    def apart(self) -> bool:
        """Whether there are two."""
        return self.router != self.others


class Place:
    """A folder for what the processes write, and the processes, which end with it."""

    def __init__(self, cores: Cores) -> None:
        self.cores = cores
        self._folder = tempfile.TemporaryDirectory(prefix="turnback-overhead-")
        self.folder = Path(self._folder.name)
        self._started: list[Process] = []

    def start(self, name: str, command: Sequence[str], core: int, env: Mapping[str, str] | None = None) -> Process:
        """Start ``command`` on ``core``."""
        environment = {**os.environ, **(env or {})}
        log = self.folder / f"{name}.log"
        process = Process(name, command, log=log, core=core, cwd=PROJECT, env=environment)
        self._started.append(process)
        return process

    def end(self, process: Process) -> None:
        """End one at once: what it would still do for its successor is no part of this."""
        process.kill()
        self._started.remove(process)

    def close(self) -> None:
        """End all, and remove the folder."""
        for process in reversed(self._started):
            process.kill()
        self._folder.cleanup()


def cpu_seconds(pid: int) -> float:
    """That a process has used, all threads together, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def most_resident(pid: int) -> int:
    """The most memory that a process had, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise BenchFailure(f"process {pid} is gone")


def log_of(process: Process) -> str:
    """The last lines that it wrote."""
    lines = process.log.read_text(errors="replace").splitlines() if process.log.exists() else []
    return "\n".join(lines[-15:])

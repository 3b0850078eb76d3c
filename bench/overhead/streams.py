"""Many streams at once through one process of the router: does each get all of its answer, in time?

`python -m bench.overhead.streams` starts the router, two instant engines for each role, each a process of its own, and
asks for 2,000 streams at once. Fails if one of them was refused, cut, or stood still. Two cores do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from bench.failure import BenchFailure
from deploy.local.layout import PROJECT
from deploy.local.ports import LOOPBACK, free_port
from proxy.server import allow_many_files

ENGINES = 2
"""Of each role."""

READY_SECONDS = 60.0

STALL_SECONDS = 10.0
"""Without an event, beyond the engine's own pause: a stream that stands still."""

BODY = {"model": "instant", "messages": [{"role": "user", "content": "Count."}], "stream": True}


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    streams: int = 2000
    tokens: int = 20
    seconds: float = 0.5
    """Between two tokens of a stream."""


@dataclass
class Outcome:
    """What became of one stream; times in seconds since all were asked for."""

    error: str = ""
    first: float = 0.0
    end: float = 0.0
    longest_gap: float = 0.0


@dataclass
class Result:
    """What became of all."""

    outcomes: list[Outcome] = field(default_factory=list)
    running_after: float = 0.0
    """Turns that the router says it serves when all are over."""
    cpu_seconds: float = 0.0
    """Of the router."""

    @property
    def errors(self) -> Counter[str]:
        """By what was wrong."""
        return Counter(outcome.error for outcome in self.outcomes if outcome.error)

    @property
    def together(self) -> int:
        """The most streams that had begun and had not ended at one moment."""
        moments = [(outcome.first, 1) for outcome in self.outcomes] + [(outcome.end, -1) for outcome in self.outcomes]
        most = now = 0
        for _, step in sorted(moments):
            now += step
            most = max(most, now)
        return most

    def __str__(self) -> str:
        firsts = sorted(outcome.first for outcome in self.outcomes)
        return (
            f"{len(self.outcomes)} streams, {self.together} at the same time, errors: {dict(self.errors) or 0}; "
            f"first event after {firsts[len(firsts) // 2]:.2f} s (median), {firsts[-1]:.2f} s (last); "
            f"longest gap {max(outcome.longest_gap for outcome in self.outcomes):.2f} s; "
            f"all over after {max(outcome.end for outcome in self.outcomes):.1f} s; "
            f"router: {self.cpu_seconds:.1f} s of CPU, {self.running_after:g} turns left"
        )


async def run(load: Load, *arguments: str) -> Result:
    """Serve ``load`` by a router with ``arguments``. Raises ``BenchFailure`` if it does not come up."""
    allow_many_files()
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2 * ENGINES):
            port = free_port()
            engine = _process("-m", "bench.overhead.instant", str(port), str(load.tokens), str(load.seconds))
            await stack.enter_async_context(engine)
            engines.append(f"http://{LOOPBACK}:{port}")
        port = free_port()
        command = ("-m", "proxy.cli", "serve", "--port", str(port), "--log-level", "warning", *arguments)
        roles = ("--prefill", *engines[:ENGINES], "--decode", *engines[ENGINES:])
        router = await stack.enter_async_context(_process(*command, *roles))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                f"http://{LOOPBACK}:{port}", connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
            )
        )
        await _ready(session, router)
        begun = time.perf_counter()
        outcomes = await asyncio.gather(*(_stream(session, load, begun) for _ in range(load.streams)))
        return Result(outcomes, await _running(session), _cpu_seconds(router.pid))


async def _stream(session: aiohttp.ClientSession, load: Load, begun: float) -> Outcome:
    outcome = Outcome()
    contents: list[str] = []
    last = 0.0
    try:
        async with session.post("/v1/chat/completions", json=BODY) as response:
            if response.status != 200:
                outcome.error = f"status {response.status}: {(await response.text())[:200]}"
                return outcome
            async for line in response.content:
                now = time.perf_counter() - begun
                if not line.startswith(b"data: "):
                    continue
                outcome.first = outcome.first or now
                outcome.longest_gap = max(outcome.longest_gap, now - (last or now))
                last = now
                if line.startswith(b"data: [DONE]"):
                    break
                contents.append(msgspec.json.decode(line[6:])["choices"][0]["delta"]["content"])
            else:
                outcome.error = "no end mark"
    except (aiohttp.ClientError, OSError, msgspec.DecodeError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        outcome.end = time.perf_counter() - begun
    if not outcome.error and contents != [str(number) for number in range(load.tokens)]:
        outcome.error = "other tokens than were sent"
    if not outcome.error and outcome.longest_gap > load.seconds + STALL_SECONDS:
        outcome.error = "stood still"
    return outcome


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=PROJECT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(session: aiohttp.ClientSession, router: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while router.returncode is None and time.monotonic() < deadline:
        try:
            async with session.get("/ready") as response:
                if all(worker["up"] and worker["probed"] for worker in (await response.json())["workers"]):
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.1)
    raise BenchFailure("the router did not become ready")


async def _running(session: aiohttp.ClientSession) -> float:
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("turnback_turns_running "))


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if a stream came to harm."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead.streams", description=__doc__)
    usual = Load()
    parser.add_argument("--streams", type=int, default=usual.streams)
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each stream")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="between two tokens")
    parser.add_argument("--router-arg", action="append", default=[], help="for turnback serve")
    given = parser.parse_args(arguments)
    try:
        result = asyncio.run(run(Load(given.streams, given.tokens, given.seconds), *given.router_arg))
    except BenchFailure as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    print(result)
    return 1 if result.errors or result.running_after else 0


if __name__ == "__main__":
    sys.exit(main())

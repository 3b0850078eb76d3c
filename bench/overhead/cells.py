"""One measurement: one contender, one size of body, so many clients, streaming or not, first turns or second ones."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import aiohttp

from bench.failure import BenchFailure
from bench.overhead.contenders import NO_ROUTER, Contender, Engines, Running
from bench.overhead.load import Answer, Direct, Lane, Order, Routed, Times, check, connect, run
from bench.overhead.place import Place, cpu_seconds, log_of
from bench.overhead.prompts import Ask, asks
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.process import Process

READY_SECONDS = 60.0
_PATIENCE = aiohttp.ClientTimeout(total=5.0)
_FEWEST = 16
"""Conversations in a batch of turns that reuse."""


@dataclass(frozen=True, order=True)
class Cell:
    """What is asked for."""

    body: int
    """Bytes."""
    streams: bool
    reuse: bool
    """Second turns, whose first ones are not counted; else first turns."""
    clients: int
    pace: float = 0.0
    """Seconds between the events of a stream."""


@dataclass(frozen=True)
class Result:
    """What came out; times in seconds."""

    turns: int
    turns_per_second: float
    p50: float
    p99: float
    first_p50: float
    """To the first bytes of the answer's body."""
    first_p99: float
    cpu_per_turn: float
    """The router's. 0 where there is none."""

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """Turns that were measured in one go."""

    times: Sequence[Times]
    used: float
    """What the router used meanwhile."""


class Meter(Protocol):
    """What a router uses of something."""

    def start(self) -> None:
        """From now on."""

    def stop(self) -> float:
        """How much since ``start``."""


class CpuMeter:
    """Seconds of CPU that a process uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = 0.0

    def start(self) -> None:
        """See ``Meter.start``."""
        self._before = cpu_seconds(self._pid)

    def stop(self) -> float:
        """See ``Meter.stop``."""
        return cpu_seconds(self._pid) - self._before


class Bench:
    """The engines, and whoever is in front of them."""

    def __init__(self, place: Place, http: aiohttp.ClientSession) -> None:
        """Starts the engines."""
        self._place = place
        self._http = http
        self._engines = Engines(free_port(), free_port())
        ports = (str(self._engines.prefill), str(self._engines.decode))
        command = [sys.executable, "-m", "bench.overhead.engine", *ports]
        self._engines_process = place.start("engines", command, place.cores.others)
        self._conversations = itertools.count(1)

    async def engines_ready(self) -> None:
        """Wait for them. Raises ``BenchFailure``."""
        await self._wait(self._engines_process, "the engines", lambda: self._answers(self._engines.decode, "/health"))

    async def start(self, contender: Contender) -> Running:
        """Start ``contender``, and wait until it can serve. Raises ``BenchFailure``."""
        running = contender.start(self._place, self._engines)
        if running.process is None:
            return running
        try:
            await self._wait(running.process, contender.name, lambda: self._answers(running.port, running.health))
        except BenchFailure:
            self.end(running)
            raise
        return running

    def end(self, running: Running) -> None:
        """End it."""
        for process in (running.process, *running.beside):
            if process is not None:
                self._place.end(process)

    async def measure(
        self, contender: Contender, running: Running, cell: Cell, seconds: float, meter: Meter | None = None
    ) -> Sample:
        """Turns for about ``seconds``. Raises ``BenchFailure`` for any answer that is not as it should be.

        ``meter`` tells what the router uses meanwhile: CPU, in seconds, if it is not given.
        """
        if meter is None and running.process is not None:
            meter = CpuMeter(running.process.pid)
        # They know a request again by its mark, and two routers may make different ones of the same turn.
        await self._ask_engines("reset")
        await self._ask_engines(f"pace/{cell.pace}")
        lanes = [await self._lane(contender, running) for _ in range(cell.clients)]
        try:
            await self._prove(contender, cell, lanes[0])
            if cell.reuse:
                return await self._second_turns(cell, lanes, seconds, meter)
            ask = asks(cell.body, streams=cell.streams).first
            # The connections to the engines, and what else is made once.
            await run(lanes, _all(self._orders(ask, _says(contender, b"first"), 2 * cell.clients)))
            deadline = time.perf_counter() + seconds
            orders = self._orders(ask, _says(contender, b"first"))
            if meter is not None:
                meter.start()
            times = await run(lanes, lambda: next(orders) if time.perf_counter() < deadline else None)
            return Sample([times], 0.0 if meter is None else meter.stop())
        finally:
            for lane in lanes:
                lane.close()

    async def _second_turns(self, cell: Cell, lanes: list[Lane], seconds: float, meter: Meter | None) -> Sample:
        both = asks(cell.body, streams=cell.streams)
        collected: list[Times] = []
        used = 0.0
        while sum(times.elapsed for times in collected) < seconds:
            first = list(self._orders(both.opening, b"first", max(2 * cell.clients, _FEWEST)))
            await run(lanes, _all(iter(first)))
            second = (Order(both.following, order.conversation, b"hit") for order in first)
            if meter is not None:
                meter.start()
            collected.append(await run(lanes, _all(second)))
            used += 0.0 if meter is None else meter.stop()
        return Sample(collected, used)

    async def _prove(self, contender: Contender, cell: Cell, lane: Lane) -> None:
        """One turn of each kind that is to come, looked at in full, also from the engines' side."""
        both = asks(cell.body, streams=cell.streams)
        conversation = next(self._conversations)
        kinds = [(both.first, b"first")]
        if cell.reuse:
            kinds = [(both.opening, b"first"), (both.following, b"hit")]
        for ask, outcome in kinds:
            before = await self._counts()
            order = Order(ask, conversation, _says(contender, outcome))
            check(order, await _one(lane, order))
            after = await self._counts()
            seen = {kind: count - before.get(kind, 0) for kind, count in after.items()}
            legs = contender.legs if outcome == b"first" else ("prefill: prefill with reuse", contender.legs[-1])
            wrong = any("wrong" in kind and count for kind, count in seen.items())
            if wrong or any(seen.get(leg, 0) != 1 for leg in legs):
                raise BenchFailure(f"{contender.name} should send {', '.join(legs)}; the engines got {seen}")

    async def _lane(self, contender: Contender, running: Running) -> Lane:
        if contender.name == NO_ROUTER:
            return Direct(await connect(self._engines.prefill), await connect(self._engines.decode))
        return Routed(await connect(running.port))

    def _orders(self, ask: Ask, outcome: bytes, count: int | None = None) -> Iterator[Order]:
        """Turns of conversations of their own."""
        for _ in itertools.repeat(None) if count is None else itertools.repeat(None, count):
            yield Order(ask, next(self._conversations), outcome)

    async def _wait(self, process: Process, name: str, ready: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not await ready():
            if process.exit_code is not None or time.monotonic() > deadline:
                raise BenchFailure(f"{name} did not become ready:\n{log_of(process)}")
            await asyncio.sleep(0.1)

    async def _answers(self, port: int, path: str) -> bool:
        """Whether it can serve; for Turnback, whether it knows what the workers can do."""
        try:
            async with self._http.get(f"http://{LOOPBACK}:{port}{path}", timeout=_PATIENCE) as response:
                workers = (await response.json()).get("workers", []) if path == "/ready" else []
                there = response.status == 200 or not path
                return there and all(worker["up"] and worker["probed"] for worker in workers)
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _counts(self) -> dict[str, int]:
        async with self._http.get(f"http://{LOOPBACK}:{self._engines.decode}/bench/counts") as response:
            return dict(await response.json())

    async def _ask_engines(self, what: str) -> None:
        async with self._http.post(f"http://{LOOPBACK}:{self._engines.decode}/bench/{what}") as response:
            await response.read()


def _says(contender: Contender, outcome: bytes) -> bytes:
    return outcome if contender.says_reuse else b""


def _all(orders: Iterator[Order]) -> Callable[[], Order | None]:
    """Each of them once."""
    waiting = deque(orders)
    return lambda: waiting.popleft() if waiting else None


async def _one(lane: Lane, order: Order) -> Answer | None:
    got: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
    lane.start(order, got.set_result)
    return await got


def result_of(samples: Sequence[Sample]) -> Result:
    """All of them taken together."""
    collected = [times for sample in samples for times in sample.times]
    used = sum(sample.used for sample in samples)
    turns = sorted(itertools.chain.from_iterable(times.turns for times in collected))
    firsts = sorted(itertools.chain.from_iterable(times.firsts for times in collected))
    return Result(
        turns=len(turns),
        turns_per_second=len(turns) / sum(times.elapsed for times in collected),
        p50=_quantile(turns, 0.5),
        p99=_quantile(turns, 0.99),
        first_p50=_quantile(firsts, 0.5),
        first_p99=_quantile(firsts, 0.99),
        cpu_per_turn=used / len(turns),
    )


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]

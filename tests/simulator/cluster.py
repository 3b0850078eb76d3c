"""The world the engines share: side channels, the clock, and what went wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .clock import Clock
from .options import Options

if TYPE_CHECKING:
    from .core import Core
    from .engine import SimEngine

Json = dict[str, Any]

HazardKind = Literal[
    "wrong-kv",
    "stale-read",
    "late-notification",
    "never-freed",
    "params-lost",
    "forbidden-member",
    "crash",
]


@dataclass(frozen=True)
class Hazard:
    """Something no correct router causes, seen by an engine that would not have noticed."""

    kind: HazardKind
    engine: str
    detail: str


class Cluster:
    """Engines that can read each other's cache memory.

    `async with` stops every engine of the cluster at the end. `hazards` lists, in order, what
    real engines would have done wrong in silence; an honest router leaves it empty, except for
    `late-notification` where blocks expired before they were given back.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.engines: list[SimEngine] = []
        self.hazards: list[Hazard] = []

    async def start(self, name: str, **options: Any) -> SimEngine:
        """A new engine, listening. `options` are the fields of `Options`."""
        from .engine import SimEngine

        engine = SimEngine(self, name, Options(**options))
        await engine.start()
        return engine

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines:
            await engine.stop()

    def report(self, kind: HazardKind, engine: str, detail: str) -> None:
        self.hazards.append(Hazard(kind, engine, detail))

    def kinds(self) -> set[HazardKind]:
        """Which kinds of hazards have been seen so far."""
        return {hazard.kind for hazard in self.hazards}

    def cores(self) -> Iterator[Core]:
        for engine in self.engines:
            if engine.alive:
                yield engine.core

    def reach(self, seeker: Core, params: Json) -> Core | None:
        """The engine at a side channel address, if it is up and the one that is expected there."""
        here = next((engine for engine in self.engines if engine.alive and engine.core is seeker), None)
        for engine in self.engines:
            core = engine.core
            if (core.host, core.port) != (params.get("remote_host"), params.get("remote_port")):
                continue
            cut_off = engine.partitioned or (here is not None and here.partitioned)
            if engine.alive and not cut_off and core.engine_id == params.get("remote_engine_id"):
                core.memory.reap()
                return core
        return None

"""What goes wrong, at random: answers, connections, workers, the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import get_args

from tests.contract.fleet import decodes, prefills, releases, renders, reuses
from tests.simulator import Fault, Point, Recorded, SimEngine
from tests.soak.house import House

DOWN_SECONDS = 2.0
"""For which a worker or the store is gone: longer than the proxies take to notice, as with any real restart."""


@dataclass
class Trouble:
    """Orders faults and remembers whom they struck."""

    house: House
    chance: Random
    struck: dict[str, str] = field(default_factory=dict)
    """Turn → the fault that struck one of its legs. Each turn is struck once at most."""
    killed: set[str] = field(default_factory=set)
    """Turns that ran when a worker was killed."""
    lost: set[str] = field(default_factory=set)
    """Engine requests whose blocks nobody knows of any more, since the store was."""
    running: set[str] = field(default_factory=set)
    """Turns that run now."""
    story: list[tuple[float, str]] = field(default_factory=list)
    """What happened when, in seconds; ``begun`` tells the same of each turn."""
    begun: dict[str, float] = field(default_factory=dict)
    _under_way: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Workers and the store, while they are gone: one prefill, one decode, and the store at most."""

    def stir(self) -> None:
        """Once a turn: perhaps something goes wrong."""
        what = self.chance.random()
        if what < 0.16:
            self._order()
        elif what < 0.172:
            role = self.chance.choice(("prefill", "decode"))
            engine = self.chance.choice(self.house.prefill if role == "prefill" else self.house.decode)
            self._begin(role, self._restart(engine))
        elif what < 0.174:
            self._begin("store", self._outage())

    def when(self, turn: str) -> str:
        """What was going on around the beginning of a turn."""
        begun = self.begun.get(turn, 0.0)
        near = [f"{what} {at - begun:+.1f} s" for at, what in self.story if abs(at - begun) < 10]
        return ", ".join(near) or "nothing near"

    def _tell(self, what: str) -> None:
        self.story.append((time.monotonic(), what))

    async def over(self) -> None:
        """Order nothing more; wait until everybody is back."""
        for engine in self.house.engines:
            engine.faults.clear()
        await asyncio.gather(*self._under_way.values())

    def _order(self) -> None:
        engine = self.chance.choice(self.house.engines)
        legs = (prefills, reuses, renders, releases) if engine in self.house.prefill else (decodes, decodes, renders)
        when = self.chance.choice(legs)
        kind = self.chance.choice(("fail", "fail", "close", "close", "close", "hang", "error_event"))
        point: Point = self.chance.choice(get_args(Point))
        if kind == "hang" and when is releases:
            kind = "close"  # nobody waits for it, for a minute
        if kind == "error_event":
            when, point = decodes, "mid_stream"
        name = f"{kind} {point} of {when.__name__} on {engine.name}"
        # A whole answer that hangs takes the turn's whole time, by design: there is no sooner sign of it.
        streams = kind == "error_event" or (kind == "hang" and when is decodes)
        engine.faults.order(
            Fault(kind, self._strikes(when, name, streams=streams), point=point, events=self.chance.randrange(6))  # type: ignore[arg-type]
        )

    def _strikes(self, when: Callable[[Recorded], bool], name: str, *, streams: bool) -> Callable[[Recorded], bool]:
        def strikes(request: Recorded) -> bool:
            if request.method != "POST" or not when(request):
                return False
            members = request.json
            turn = members.get("user", "")
            if not turn and when is not releases:
                return False  # a question about what a worker can do
            if turn in self.struck or (streams and not members.get("stream")):
                return False
            if turn:
                self.struck[turn] = name
            return True

        return strikes

    def _begin(self, what: str, doing: object) -> None:
        assert asyncio.iscoroutine(doing)
        if what in self._under_way and not self._under_way[what].done():
            doing.close()
            return
        self._under_way[what] = asyncio.create_task(doing)

    async def _restart(self, engine: SimEngine) -> None:
        self.killed |= self.running
        self._tell(f"{engine.name} killed")
        await engine.stop()
        await asyncio.sleep(DOWN_SECONDS)
        self.killed |= self.running
        await engine.start()
        self._tell(f"{engine.name} started")

    async def _outage(self) -> None:
        """Redis crashes and comes back empty."""
        self._lose()
        self._tell("store killed")
        self.house.redis.stop()
        await asyncio.sleep(DOWN_SECONDS / 4)
        await asyncio.to_thread(self.house.redis.start)
        self._tell("store started")
        # What was being stored at that time is not there either.
        await asyncio.sleep(DOWN_SECONDS / 2)
        self._lose()

    def _lose(self) -> None:
        self.lost |= {kept.request_id for engine in self.house.decode if engine.alive for kept in engine.retained}

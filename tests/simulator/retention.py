"""Blocks kept after a request has ended, until someone has read them or time is up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["retained", "leased"]


@dataclass(eq=False)
class Retention:
    """`leased`: kept by prefill for decode. `retained`: kept by decode for the next turn.

    `deadline` is in the engine's private clock; None means that nobody ever frees them.
    """

    request_id: str
    kind: Kind
    blocks: list[int]
    num_tokens: int
    deadline: float | None
    lease: float
    renewers: dict[str, float] = field(default_factory=dict)

    def expired(self, now: float) -> bool:
        return self.deadline is not None and not self.renewers and now >= self.deadline

    def renew(self, by: str, now: float) -> None:
        """A request that waits for these blocks begins to send heartbeats."""
        self.renewers[by] = now

    def stop_renewing(self, by: str, now: float) -> None:
        """Heartbeats end; the deadline is that of the last one that was due."""
        since = self.renewers.pop(by, None)
        interval = self.lease // 6
        if since is None or self.deadline is None or interval <= 0:
            return
        last = since + math.floor((now - since) / interval) * interval
        self.deadline = max(self.deadline, last + self.lease * 2 // 3)


@dataclass(frozen=True)
class Held:
    """How many blocks are held, in all (shared ones once) and by whom."""

    blocks: int
    running: dict[str, int]
    leased: dict[str, int]
    retained: dict[str, int]

    def __bool__(self) -> bool:
        return bool(self.blocks or self.running or self.leased or self.retained)

"""What comes in and what goes out of a turn."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from proxy.dialects import ClientRequest, Dialect
from proxy.interruption import Interruption
from router.fingerprint import Scope
from router.reuse import Outcome, Reason

REPORT = "turnback.report"
"""Where a request's ASGI scope has its ``Report``, for what is around the endpoint."""

Clock = Callable[[], float]
"""Tells the seconds since the epoch."""


def unique_id() -> str:
    """What nobody else makes, in no process: 128 random bits as hex. A name, and no secret.

    The generator is seeded by the system, anew in each process; to ask the system each time takes far longer.
    """
    return f"{random.getrandbits(128):032x}"


class Call(msgspec.Struct, frozen=True):
    """One request of a client, read and found to be one."""

    dialect: Dialect
    request: ClientRequest
    request_id: str
    """The client's own, or one made for it; echoed and logged."""
    key: str | None
    """Of its conversation in the store; None if it named none."""
    scope: Scope
    reuse: bool
    """Whether something may be reused for it; what it leaves is then kept for the next turn."""
    interruption: Interruption
    """What may end it before its time."""


class Report(msgspec.Struct):
    """What is told about a turn, in its response headers, its log line and the metrics."""

    legs: int = 0
    """Legs that were sent, on all workers."""

    outcome: Outcome | None = None
    """None until it is known: of a request that was refused before."""
    reason: Reason | None = None
    reused_tokens: int = 0
    recomputed_tokens: int | None = None
    """Tokens that an earlier turn had computed, computed again; None where nobody can tell."""
    prompt_tokens: int | None = None
    """None where nobody told."""
    output_tokens: int | None = None
    """None where nobody told."""
    turn: int = 1
    conversation: str = ""
    """A short hash, by which a conversation's lines are found in the log; empty if it named none."""
    prefill: str = ""
    prefill_request_id: str = ""
    """By which the last prefill leg is found in the engine's own log."""
    decode: str = ""
    decode_request_id: str = ""
    unique: str = msgspec.field(default_factory=unique_id)
    status: int = 0
    started: float = msgspec.field(default_factory=time.perf_counter)
    first_part: float | None = None
    last_part: float | None = None
    decode_sent: float | None = None
    """When the leg that answers was sent; like the other moments on ``time.perf_counter``."""
    pause_seconds: float | None = None
    """Since the conversation's last answer; None if there is none that is remembered."""
    queue_seconds: float = 0.0
    render_seconds: float | None = None
    prefill_seconds: float | None = None
    """Of the last prefill leg that came to something."""

    def next_leg(self) -> str:
        """A request id for a leg: no other has the same, whatever clients send as theirs."""
        self.legs += 1
        return f"{self.unique}-{self.legs}"

    def label(self, outcome: Outcome, reason: Reason) -> None:
        """What became of reuse, from what is known now."""
        self.outcome, self.reason = outcome, reason
        if outcome not in (Outcome.HIT, Outcome.PARTIAL):
            self.reused_tokens = 0


class Parts(Protocol):
    """A body that comes in parts."""

    over: bool
    """Whether nothing follows what ``next`` gave."""

    async def next(self) -> bytes:
        """The next part; not to be asked for when it is over."""


@dataclass
class Reply:
    """What the client gets. ``closing`` must be closed whether or not the body was read to its end."""

    status: int
    content_type: str
    body: bytes | Parts
    report: Report
    closing: ExitStack = field(default_factory=ExitStack)

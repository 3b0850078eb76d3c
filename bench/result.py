"""What `turnback bench` writes and `turnback advise` reads. Needs no library beyond the router's own.

Times are seconds, lengths are tokens. Neither texts nor keys are in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.failure import BenchFailure

VERSION = 1

Phase = Literal["warmup", "main", "past_ttl"]
REUSED = ("hit", "partial")
"""Outcomes of turns that reused something."""


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in one arm. What the server did not tell is None."""

    arm: str
    conversation: int
    """The same number in all arms."""
    turn: int
    """From 1."""
    phase: Phase
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reused_tokens: int | None = None
    """Prompt tokens that prefill did not have to compute."""
    outcome: str | None = None
    """What became of reuse, as the router says it (`x-turnback-reuse`)."""
    reason: str | None = None
    ttft_seconds: float | None = None
    """From sending the request to the first content."""
    tpot_seconds: float | None = None
    """Per output token after the first."""
    turn_seconds: float | None = None
    pause_seconds: float | None = None
    """From the end of this conversation's last answer in this arm to this request; None for first turns."""
    started_seconds: float
    """Since the run began."""
    error: str | None = None
    """Why there is no complete answer."""
    answer_digest: str | None = None
    """Equal for equal answers."""

    @property
    def reused(self) -> bool:
        """Whether the router says that something was reused."""
        return self.outcome in REUSED


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """What one decode worker held for next turns at one moment."""

    at_seconds: float
    """Since the run began."""
    worker: str
    entries: int | None = None
    tokens: int | None = None
    share: float | None = None
    """Of the worker's KV cache, from 0 to 1."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    turnback_bench: int = VERSION
    created: str
    """ISO 8601, UTC."""
    settings: dict[str, Any]
    arms: list[str]
    """`["off", "on"]` where reuse was compared, else one name."""
    workload: dict[str, Any]
    turns: list[TurnResult]
    retained: list[Retained] = []
    """Empty where the server does not tell."""
    summary: dict[str, Any] = {}
    """What the table shows."""
    ttl_seconds: float | None = None
    """For how long decode keeps a turn's blocks, as far as it was told."""
    kv_capacity_tokens: dict[str, int] | None = None
    """By decode worker."""


def load(path: Path) -> Result:
    """The result in ``path``. Raises ``BenchFailure``, naming the file, if there is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BenchFailure(f"cannot read {path}: {error.strerror}") from error
    try:
        result = msgspec.json.decode(content, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchFailure(f"{path} is not a result of turnback bench: {error}") from error
    if result.turnback_bench != VERSION:
        raise BenchFailure(f"{path} is a result of version {result.turnback_bench}; only {VERSION} is understood")
    return result


def save(result: Result, path: Path) -> None:
    """Write it to ``path``. Raises ``BenchFailure``, naming the file, if that cannot be done."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise BenchFailure(f"cannot write {path}: {error.strerror}") from error

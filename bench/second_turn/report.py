"""What came out: medians, ratios, and a table that can be pasted into Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.table import Table


@dataclass
class Samples:
    """TTFTs of one arm's second turns, in seconds."""

    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes with reuse, by medians."""
        return median(self.off) / median(self.on)

    @property
    def row(self) -> str:
        """Both medians, in milliseconds."""
        return f"{1000 * median(self.off):.0f} → {1000 * median(self.on):.0f} ms"


@dataclass
class Measured:
    """Everything measured at one length of context."""

    context: int
    """Tokens of the first turn's prompt, as asked for."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Of the second turns."""
    reused_tokens: list[int] = field(default_factory=list)
    """By the router."""
    bare: Samples = field(default_factory=Samples)
    router: Samples = field(default_factory=Samples)
    equal: list[bool] = field(default_factory=list)
    """By conversation: whether all arms answered with the same tokens."""

    @property
    def kept(self) -> float:
        """The share of the bare protocol's ratio that the router keeps."""
        return self.router.ratio / self.bare.ratio

    @property
    def added(self) -> tuple[float, float]:
        """Seconds that the router adds to the bare protocol's median, without and with reuse."""
        return (
            median(self.router.off) - median(self.bare.off),
            median(self.router.on) - median(self.bare.on),
        )


def table(measured: Sequence[Measured]) -> Table:
    """One row per context."""
    made = Table(
        "context",
        "bare, off → on",
        "ratio",
        "router, off → on",
        "ratio",
        "router / bare",
        "router adds, off / on",
        "answers equal",
        box=box.MARKDOWN,
        title="TTFT of the second turn without and with reuse, medians",
        title_justify="left",
    )
    for one in measured:
        off, on = one.added
        made.add_row(
            f"{one.context:,}",
            one.bare.row,
            f"{one.bare.ratio:.1f}",
            one.router.row,
            f"{one.router.ratio:.1f}",
            f"{one.kept:.2f}",
            f"{1000 * off:+.0f} / {1000 * on:+.0f} ms",
            f"{sum(one.equal)} of {len(one.equal)}",
        )
    return made


def as_json(measured: Sequence[Measured], load: Sequence[float]) -> dict[str, Any]:
    """Everything, in seconds: each sample, and what the table says; and the machine's ``load`` before and after."""
    return {"load": list(load), "contexts": _contexts(measured)}


def _contexts(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    return [
        asdict(one)
        | {
            "bare_ratio": one.bare.ratio,
            "router_ratio": one.router.ratio,
            "router_ratio_to_bare_ratio": one.kept,
            "router_adds": dict(zip(("off", "on"), one.added, strict=True)),
        }
        for one in measured
    ]

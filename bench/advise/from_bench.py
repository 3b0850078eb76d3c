"""Evidence from a result of `turnback bench`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from bench.advise.evidence import Evidence, Held, OutcomeCount, Pair, Point, Told, leaves_entry
from bench.advise.spread import Spread
from bench.result import Result, Retained, TurnResult
from proxy.telemetry import context_of


def from_bench(result: Result, source: str) -> Evidence:
    """What ``result`` shows. Warm-up, turns past the TTL on purpose, and turns that failed are left out."""
    turns = [turn for turn in result.turns if turn.phase == "main" and turn.error is None]
    reusing_arm = "on" if "on" in result.arms else result.arms[0] if result.arms else ""
    reusing = [turn for turn in turns if turn.arm == reusing_arm]
    counts = Counter((turn.outcome or "", turn.reason or "") for turn in reusing)
    leaving = [turn for turn in reusing if leaves_entry(turn.outcome, turn.reason)]
    lengths = [
        turn.prompt_tokens + (turn.output_tokens or 0) for turn in leaving or reusing if turn.prompt_tokens is not None
    ]
    return Evidence(
        source=source,
        kind="bench",
        outcomes=tuple(OutcomeCount(outcome, reason, count) for (outcome, reason), count in counts.items() if outcome),
        pauses=Spread.of_values(turn.pause_seconds for turn in reusing if turn.pause_seconds is not None),
        turns_per_second=_rate(leaving or reusing),
        tokens_per_entry=sum(lengths) / len(lengths) if lengths else None,
        capacity_tokens=sum(result.kv_capacity_tokens.values()) if result.kv_capacity_tokens else None,
        held=_most_held(result.retained),
        told=Told(ttl=() if result.ttl_seconds is None else (result.ttl_seconds,)),
        points=tuple(_points(turns)),
        points_are="first tokens",
        pairs=tuple(_pairs(turns)) if {"off", "on"} <= set(result.arms) else (),
    )


def _rate(turns: Sequence[TurnResult]) -> float | None:
    """Turns a second, from the first one's start to the last one's end."""
    if not turns:
        return None
    start = min(turn.started_seconds for turn in turns)
    end = max(turn.started_seconds + (turn.turn_seconds or 0) for turn in turns)
    return len(turns) / (end - start) if end > start else None


def _points(turns: Iterable[TurnResult]) -> Iterable[Point]:
    for turn in turns:
        if turn.ttft_seconds is None or turn.prompt_tokens is None:
            continue
        kept = turn.reused_tokens or 0
        # What prefill had in a cache of its own was neither computed nor copied.
        yield Point(turn.prompt_tokens - kept, kept if turn.reused else 0, turn.ttft_seconds, group=turn.conversation)


def _pairs(turns: Iterable[TurnResult]) -> Iterable[Pair]:
    """Later turns that were complete in both arms. First ones have nothing to reuse."""
    by_turn: dict[tuple[int, int], dict[str, TurnResult]] = defaultdict(dict)
    for turn in turns:
        by_turn[turn.conversation, turn.turn][turn.arm] = turn
    for (conversation, number), arms in by_turn.items():
        off, on = arms.get("off"), arms.get("on")
        if number < 2 or off is None or on is None or off.ttft_seconds is None or on.ttft_seconds is None:
            continue
        tokens = on.prompt_tokens or off.prompt_tokens
        if tokens is not None:
            yield Pair(conversation, context_of(tokens), off.ttft_seconds, on.ttft_seconds)


def _most_held(retained: Iterable[Retained]) -> Held | None:
    moments: dict[float, list[Retained]] = defaultdict(list)
    for one in retained:
        if one.tokens is not None:
            moments[one.at_seconds].append(one)
    most = max(moments.values(), key=lambda some: sum(one.tokens or 0 for one in some), default=None)
    if most is None:
        return None
    return Held(
        entries=sum(one.entries or 0 for one in most),
        tokens=sum(one.tokens or 0 for one in most),
        share=max((one.share for one in most if one.share is not None), default=None),
    )

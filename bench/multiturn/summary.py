"""What the turns of a run come to. Times are seconds, lengths tokens; only turns that count, unless said."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from bench.result import Retained, TurnResult
from proxy.telemetry import CONTEXTS, context_of


class Spread(msgspec.Struct, frozen=True):
    """How some times lie."""

    count: int
    p50: float
    p95: float
    p99: float


class ContextRow(msgspec.Struct, frozen=True):
    """Later turns whose prompts are about equally long."""

    context: str
    prompt_tokens: int | None
    """Their median."""
    ttft: dict[str, Spread]
    """By arm."""
    ratio: float | None
    """TTFT without reuse by that with it, medians."""
    compared: int
    equal: int
    """Of these: answers that are equal in all arms."""


class TurnRow(msgspec.Struct, frozen=True):
    """All conversations' turns with one number."""

    turn: int
    prompt_tokens: int | None
    ttft: dict[str, Spread]
    outcomes: dict[str, dict[str, int]]
    """By arm."""


class ArmRow(msgspec.Struct, frozen=True):
    """One arm."""

    arm: str
    turns: int
    errors: int
    ttft: Spread | None
    later_ttft: Spread | None
    """Without first turns, which have nothing to reuse."""
    turn_seconds: Spread | None
    tpot: Spread | None
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int
    computed_again_tokens: int
    """Of the prompts: had been said or generated in an earlier turn, and were not brought back from decode."""
    hit_rate: float | None
    """Share of later turns that reused something; None where the server does not tell."""
    outcomes: dict[str, int]
    busy_seconds: float
    """In which at least one of its turns ran."""
    output_tokens_per_second: float | None
    """Of those."""
    prompt_tokens_per_second: float | None


class PastTtl(msgspec.Struct, frozen=True):
    """The phase in which nothing may be reused."""

    turns: int
    errors: int
    reused: int
    """Turns that reused something all the same: wrong."""
    outcomes: dict[str, int]
    """Of the arm with reuse."""
    contexts: list[ContextRow]
    compared: int
    equal: int


class Summary(msgspec.Struct, frozen=True):
    """All of it."""

    arms: list[ArmRow]
    contexts: list[ContextRow]
    turns: list[TurnRow]
    compared: int
    """Turns that were answered in all arms."""
    equal: int
    past_ttl: PastTtl | None
    peak_retained_tokens: int | None
    """On all decode workers together."""
    peak_retained_share: float | None
    """Of the worker that held most of its KV cache."""
    router_prompt_tokens: dict[str, int] | None
    """Prompt tokens by fate, both arms together, as the router counted them."""


def summarised(
    turns: Sequence[TurnResult],
    arms: Sequence[str],
    retained: Sequence[Retained] = (),
    router_prompt_tokens: dict[str, int] | None = None,
    contexts: Sequence[int] = (),
) -> Summary:
    """``contexts``: the lengths of second prompts that were asked for, by which later turns are then grouped."""
    counted = [turn for turn in turns if turn.phase == "main"]
    again = _computed_again(counted)
    compared, equal = equality(counted, arms)
    return Summary(
        arms=[_arm(arm, [turn for turn in counted if turn.arm == arm], again) for arm in arms],
        contexts=_contexts(counted, arms, contexts),
        turns=_turns(counted, arms),
        compared=compared,
        equal=equal,
        past_ttl=_past_ttl([turn for turn in turns if turn.phase == "past_ttl"], arms, contexts),
        peak_retained_tokens=_peak_tokens(retained),
        peak_retained_share=max((look.share for look in retained if look.share is not None), default=None),
        router_prompt_tokens=router_prompt_tokens,
    )


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing. Between two values it is interpolated."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(1, values[0], values[0], values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Spread(len(values), cuts[49], cuts[94], cuts[98])


def equality(turns: Iterable[TurnResult], arms: Sequence[str]) -> tuple[int, int]:
    """Turns that were answered in all arms, and how many of them equally."""
    digests: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for turn in turns:
        if turn.answer_digest is not None:
            digests[turn.conversation, turn.turn].append(turn.answer_digest)
    compared = [found for found in digests.values() if len(found) == len(arms) > 1]
    return len(compared), sum(len(set(found)) == 1 for found in compared)


def busy_seconds(turns: Iterable[TurnResult]) -> float:
    """In which at least one of ``turns`` ran."""
    busy, until = 0.0, float("-inf")
    for turn in sorted(turns, key=lambda turn: turn.started_seconds):
        end = turn.started_seconds + (turn.turn_seconds or 0.0)
        busy += max(0.0, end - max(turn.started_seconds, until))
        until = max(until, end)
    return busy


def _computed_again(turns: Iterable[TurnResult]) -> dict[tuple[str, int, int], int]:
    """By arm, conversation and turn."""
    before: dict[tuple[str, int], int] = {}
    again: dict[tuple[str, int, int], int] = {}
    for turn in sorted(turns, key=lambda turn: turn.turn):
        if turn.prompt_tokens is None:
            continue
        conversation = (turn.arm, turn.conversation)
        known = min(before.get(conversation, 0), turn.prompt_tokens)
        again[*conversation, turn.turn] = max(0, known - (turn.reused_tokens or 0))
        before[conversation] = turn.prompt_tokens + (turn.output_tokens or 0)
    return again


def _arm(arm: str, turns: Sequence[TurnResult], again: dict[tuple[str, int, int], int]) -> ArmRow:
    answered = [turn for turn in turns if turn.error is None]
    later = [turn for turn in answered if turn.turn > 1]
    told = [turn for turn in later if turn.outcome is not None]
    busy = busy_seconds(answered)
    output = sum(turn.output_tokens or 0 for turn in answered)
    prompt = sum(turn.prompt_tokens or 0 for turn in answered)
    return ArmRow(
        arm=arm,
        turns=len(turns),
        errors=len(turns) - len(answered),
        ttft=spread(_some(turn.ttft_seconds for turn in answered)),
        later_ttft=spread(_some(turn.ttft_seconds for turn in later)),
        turn_seconds=spread(_some(turn.turn_seconds for turn in answered)),
        tpot=spread(_some(turn.tpot_seconds for turn in answered)),
        prompt_tokens=prompt,
        output_tokens=output,
        reused_tokens=sum(turn.reused_tokens or 0 for turn in answered),
        computed_again_tokens=sum(again.get((turn.arm, turn.conversation, turn.turn), 0) for turn in answered),
        hit_rate=sum(turn.reused for turn in told) / len(told) if told else None,
        outcomes=_outcomes(answered),
        busy_seconds=busy,
        output_tokens_per_second=output / busy if busy else None,
        prompt_tokens_per_second=prompt / busy if busy else None,
    )


def _contexts(turns: Sequence[TurnResult], arms: Sequence[str], contexts: Sequence[int]) -> list[ContextRow]:
    groups: defaultdict[tuple[float, str], list[TurnResult]] = defaultdict(list)
    for turn in turns:
        if turn.turn > 1 and turn.error is None:
            groups[_group(turn.prompt_tokens, contexts)].append(turn)
    return [_context(label, found, arms) for (_, label), found in sorted(groups.items())]


def _group(tokens: int | None, contexts: Sequence[int]) -> tuple[float, str]:
    """Where a prompt belongs: a place in the order, and a name."""
    if tokens is None:
        return float("inf"), "not told"
    if contexts:
        nearest = min(contexts, key=lambda context: abs(context - tokens))
        return nearest, f"{nearest:,}"
    label = context_of(tokens)
    return CONTEXTS.index(label), label


def _context(label: str, turns: Sequence[TurnResult], arms: Sequence[str]) -> ContextRow:
    ttft = _by_arm(turns, arms)
    compared, equal = equality(turns, arms)
    return ContextRow(label, _median_prompt(turns), ttft, ratio_of(ttft), compared, equal)


def ratio_of(ttft: dict[str, Spread]) -> float | None:
    """Median without reuse by that with it, where there are both."""
    off, on = ttft.get("off"), ttft.get("on")
    return off.p50 / on.p50 if off is not None and on is not None and on.p50 else None


def _turns(turns: Sequence[TurnResult], arms: Sequence[str]) -> list[TurnRow]:
    groups: defaultdict[int, list[TurnResult]] = defaultdict(list)
    for turn in turns:
        if turn.error is None:
            groups[turn.turn].append(turn)
    return [
        TurnRow(
            number,
            _median_prompt(found),
            _by_arm(found, arms),
            {arm: outcomes for arm in arms if (outcomes := _outcomes(turn for turn in found if turn.arm == arm))},
        )
        for number, found in sorted(groups.items())
    ]


def _past_ttl(turns: Sequence[TurnResult], arms: Sequence[str], contexts: Sequence[int]) -> PastTtl | None:
    if not turns:
        return None
    compared, equal = equality(turns, arms)
    return PastTtl(
        turns=len(turns),
        errors=sum(turn.error is not None for turn in turns),
        reused=sum(turn.reused for turn in turns),
        outcomes=_outcomes(turn for turn in turns if turn.arm == arms[-1] and turn.error is None),
        contexts=_contexts(turns, arms, contexts),
        compared=compared,
        equal=equal,
    )


def _by_arm(turns: Sequence[TurnResult], arms: Sequence[str]) -> dict[str, Spread]:
    return {
        arm: found
        for arm in arms
        if (found := spread(_some(turn.ttft_seconds for turn in turns if turn.arm == arm))) is not None
    }


def _outcomes(turns: Iterable[TurnResult]) -> dict[str, int]:
    return dict(Counter(turn.outcome for turn in turns if turn.outcome is not None).most_common())


def _median_prompt(turns: Iterable[TurnResult]) -> int | None:
    lengths = _some(turn.prompt_tokens for turn in turns)
    return round(statistics.median(lengths)) if lengths else None


def _peak_tokens(retained: Iterable[Retained]) -> int | None:
    at_once: defaultdict[float, int] = defaultdict(int)
    for look in retained:
        if look.tokens is not None:
            at_once[look.at_seconds] += look.tokens
    return max(at_once.values(), default=None)


def _some(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]

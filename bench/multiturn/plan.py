"""From the settings to what is served: read or drawn, cut to what fits, and no more than asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bench.failure import BenchFailure
from bench.multiturn.distribution import distribution
from bench.multiturn.settings import BenchSettings
from bench.multiturn.talk import Talk, Turn, Workload
from bench.multiturn.words import Measure
from bench.multiturn.workloads.bailian import bailian
from bench.multiturn.workloads.mooncake import mooncake
from bench.multiturn.workloads.sessions import sessions
from bench.multiturn.workloads.sharegpt import sharegpt
from bench.multiturn.workloads.synthetic import Shape, by_context, synthetic

SPARE = 128
"""Tokens of context that are left over: lengths are estimates, and a turn past the TTL comes on top."""


def plan(settings: BenchSettings, measure: Measure, limit: int | None) -> Workload:
    """What is served; ``limit`` is what the model can, in tokens of prompt and answer. Raises ``BenchFailure``."""
    talks = (_short_answers(talk, settings.max_answer) for talk in _all(settings))
    most = min((bound for bound in (limit, settings.max_context) if bound is not None), default=None)
    if settings.contexts:
        return Workload(_that_fit(talks, measure, most))
    least = settings.min_turns if settings.file is not None else 1
    taken: list[Talk] = []
    looked_at = 0
    for talk in talks:
        looked_at += 1
        fitting = talk if most is None else cut(talk, measure, most)
        if len(fitting.turns) >= least:
            taken.append(fitting)
        if len(taken) == settings.conversations:
            break
    if not taken:
        within = f" within {most} tokens" if most is not None else ""
        raise BenchFailure(f"no conversation has {least} turns or more{within}; {looked_at} were looked at")
    first = min(talk.arrival_seconds for talk in taken)
    taken = [replace(talk, arrival_seconds=talk.arrival_seconds - first) for talk in taken]
    return Workload(tuple(taken), passed_over=looked_at - len(taken))


def cut(talk: Talk, measure: Measure, most: int) -> Talk:
    """``talk`` without the turns by which it would be longer than ``most`` tokens."""
    length = SPARE
    kept: list[Turn] = []
    for turn in talk.turns:
        length += sum(measure.tokens(message) for message in turn.says) + turn.answer_tokens
        if length > most:
            break
        kept.append(turn)
    return talk if len(kept) == len(talk.turns) else replace(talk, turns=tuple(kept))


def _that_fit(talks: Iterable[Talk], measure: Measure, most: int | None) -> tuple[Talk, ...]:
    """All of them. Raises ``BenchFailure`` if one is too long: its context was asked for."""
    wanted = tuple(talks)
    too_long = [talk for talk in wanted if most is not None and cut(talk, measure, most) != talk]
    if too_long:
        longest = max(talk.context or 0 for talk in too_long)
        raise BenchFailure(f"contexts: {longest} tokens do not fit into {most}, with the rest")
    return wanted


def _all(settings: BenchSettings) -> Iterable[Talk]:
    pause = distribution(settings.pause)
    if settings.file is None:
        shape = Shape(
            turns=distribution("2" if settings.contexts and settings.turns == _USUAL_TURNS else settings.turns),
            system=distribution(settings.system_tokens),
            tool=distribution(settings.tool_tokens),
            answer=distribution(settings.answer_tokens),
            pause=pause,
        )
        if not settings.contexts:
            return synthetic(shape, settings.conversations, settings.seed)
        try:
            return by_context(shape, settings.contexts, settings.conversations, settings.seed)
        except ValueError as error:
            raise BenchFailure(f"contexts: {error}") from error
    if settings.workload == "sharegpt":
        return sharegpt(settings.file, pause, settings.seed)
    if settings.workload == "sessions":
        return sessions(settings.file, pause, settings.seed)
    return (mooncake if settings.workload == "mooncake" else bailian)(settings.file, settings.time_scale)


_USUAL_TURNS = BenchSettings.model_fields["turns"].default


def _short_answers(talk: Talk, most: int) -> Talk:
    turns = tuple(replace(turn, answer_tokens=min(turn.answer_tokens, most)) for turn in talk.turns)
    return replace(talk, turns=turns)

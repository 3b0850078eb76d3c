"""From the settings to what is served: read or drawn, cut to what fits, and no more than asked for."""

from __future__ import annotations

from collections.abc import Sequence
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
    talks = [_short_answers(talk, settings.max_answer) for talk in _all(settings)]
    most = min((bound for bound in (limit, settings.max_context) if bound is not None), default=None)
    if settings.contexts:
        too_long = [talk for talk in talks if most is not None and cut(talk, measure, most) != talk]
        if too_long:
            raise BenchFailure(
                f"contexts: {max(talk.context or 0 for talk in too_long)} tokens do not fit into {most}, with the rest"
            )
        return Workload(tuple(talks))
    least = settings.min_turns if settings.file is not None else 1
    taken: list[Talk] = []
    for talk in talks:
        fitting = talk if most is None else cut(talk, measure, most)
        if len(fitting.turns) >= least and len(taken) < settings.conversations:
            taken.append(fitting)
    if not taken:
        raise BenchFailure(
            f"no conversation has {least} turns or more"
            + (f" within {most} tokens" if most is not None else "")
            + f"; {len(talks)} were looked at"
        )
    first = min(talk.arrival_seconds for talk in taken)
    taken = [replace(talk, arrival_seconds=talk.arrival_seconds - first) for talk in taken]
    return Workload(tuple(taken), passed_over=len(talks) - len(taken))


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


def _all(settings: BenchSettings) -> Sequence[Talk]:
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

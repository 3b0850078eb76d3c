"""Which worker: filter, score, pick. Every rule is one function over plain values; policies put them together."""

from collections.abc import Callable, Container, Iterable, Sequence
from random import Random
from typing import Literal

import msgspec

from router.workers import Worker

Filter = Callable[[Sequence[Worker]], Sequence[Worker]]
"""Those that may be chosen: some of them, never none of some."""
Score = Callable[[Worker], float]
"""How good a choice it is; higher is better."""

LEG_TOKENS = 256
"""What a leg counts beside its tokens: a place in the batch, and a length that may not be known."""

OTHERS_LEG_TOKENS = 512
"""What a request of somebody else counts. Less than most have: every router sees the same report and answers
it at once, and all of them together would overrun the worker that it shows idle."""

BELIEVED_FOR = 15.0
"""Seconds after which a worker's own report tells nothing any more."""


Policy = Literal["cache_aware", "least_loaded", "round_robin", "random", "power_of_two"]
"""By which rule workers are chosen among those that may be."""


class Bound(msgspec.Struct, frozen=True):
    """Up to which load the worker that holds something of a conversation is preferred."""

    factor: float
    """Times the least loaded one's load."""
    slack: float
    """Tokens on top, so that nobody is sent away from a worker that has next to nothing to do."""


class Wish(msgspec.Struct, frozen=True):
    """What is known of the leg that a worker is wanted for."""

    holder: str | None = None
    """Name of the worker that holds something of the conversation."""
    tried: tuple[str, ...] = ()
    """Names of those that failed in this turn."""
    tokens: int | None = None
    """That the worker will have to hold; None if that is not known, or no matter."""


def choose(workers: Sequence[Worker], filters: Sequence[Filter], scores: Sequence[Score]) -> Worker | None:
    """The worker left by ``filters`` with the best ``scores``, compared in order; None if there is no worker.

    Of entirely equal ones the first.
    """
    left = workers
    for keep in filters:
        if len(left) <= 1:
            # Filters leave some of some, so they all leave this one.
            break
        left = keep(left)
    if len(left) == 1:
        return left[0]
    return max(left, key=lambda worker: tuple(score(worker) for score in scores), default=None)


def select(
    policy: Policy, workers: Sequence[Worker], wish: Wish, bound: Bound, now: float, chance: Random
) -> Worker | None:
    """The worker for a leg by ``policy``; None if there is none at all. ``now`` as in ``Worker.available``."""
    if len(workers) == 1:
        # The only one of its role: no rule decides otherwise, and every turn asks several times.
        return workers[0]
    load = load_at(now)
    may = (not_tried(wish.tried), is_available(now), not_draining, has_room(wish))
    match policy:
        case "cache_aware":
            return choose(workers, (*may, held_within(wish.holder, bound, load)), (least(load), longest_unused))
        case "least_loaded":
            return choose(workers, may, (least(load), longest_unused))
        case "round_robin":
            return choose(workers, may, (longest_unused,))
        case "random":
            return choose(workers, may, (at_random(chance),))
        case "power_of_two":
            return choose(workers, (*may, two_of(chance)), (least(load), longest_unused))


# --- filters


def not_tried(names: Iterable[str]) -> Filter:
    """Those not tried in this turn; rather on another server than another rank of one tried; all if all were."""
    tried = frozenset(names)
    servers = {name.partition("#")[0] for name in tried}

    def keep(workers: Sequence[Worker]) -> Sequence[Worker]:
        if not tried:
            return workers
        elsewhere = [worker for worker in workers if worker.url not in servers]
        return elsewhere or [worker for worker in workers if worker.name not in tried] or workers

    return keep


def is_available(now: float) -> Filter:
    """Those that answer; else those of which it is not known that they do not; else all.

    A probe can be wrong, and a turn that is tried and fails is no worse than a turn that is not tried.
    """

    def keep(workers: Sequence[Worker]) -> Sequence[Worker]:
        return (
            [worker for worker in workers if worker.available(now)]
            or [worker for worker in workers if not worker.given_up(now)]
            or [worker for worker in workers if worker.up]
            or workers
        )

    return keep


def not_draining(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Those that are to get new work; all if none is: a turn is better served by one of them than not at all."""
    return [worker for worker in workers if not worker.draining] or workers


def has_room(wish: Wish) -> Filter:
    """Those that can hold the request beside all they hold; all if none can.

    The conversation's own holder stays, whatever it holds: room can be made there, and it needs the least.
    """

    def keep(workers: Sequence[Worker]) -> Sequence[Worker]:
        if wish.tokens is None:
            return workers
        return [worker for worker in workers if worker.name == wish.holder or _fits(worker, wish.tokens)] or workers

    return keep


def _fits(worker: Worker, tokens: int) -> bool:
    """Whether ``worker``, as far as it tells, has so many tokens' blocks free."""
    found, told = worker.capabilities, worker.reported
    if found is None or not found.num_blocks or not found.block_size or told is None or told.kv_usage is None:
        return True
    free = found.num_blocks * found.block_size * (1 - told.kv_usage)
    return tokens <= free


def held_within(holder: str | None, bound: Bound, load: Score) -> Filter:
    """The holder alone, unless it is loaded past ``bound``; then, or without a holder, all."""

    def keep(workers: Sequence[Worker]) -> Sequence[Worker]:
        for worker in workers:
            if worker.name == holder:
                lowest = min(load(other) for other in workers)
                return [worker] if load(worker) <= lowest * bound.factor + bound.slack else workers
        return workers

    return keep


def two_of(chance: Random) -> Filter:
    """Two at random: nobody is everybody's choice, however idle it looks."""
    return lambda workers: chance.sample(workers, 2) if len(workers) > 2 else workers


# --- scores


def load_at(now: float) -> Score:
    """Not a score but its opposite: what a worker has to do, in tokens.

    Of ours all of it is known; of others' it counts what the worker reported lately.
    """

    def load(worker: Worker) -> float:
        reported = worker.reported
        others = reported.others if reported is not None and now - reported.read_at <= BELIEVED_FOR else 0
        return worker.in_flight_tokens + LEG_TOKENS * worker.in_flight + OTHERS_LEG_TOKENS * others

    return load


def least(load: Score) -> Score:
    """Prefers the worker with the least ``load``."""
    return lambda worker: -load(worker)


def longest_unused(worker: Worker) -> float:
    """Prefers the worker whose turn it is: equal ones take turns, and none is forgotten."""
    return -worker.last_chosen


def at_random(chance: Random) -> Score:
    """Prefers anybody."""
    return lambda _: chance.random()


def best_first(workers: Iterable[Worker], failed: Container[str]) -> list[Worker]:
    """All of them, in the order in which to ask them one after the other.

    Last those known to have failed, before them those that are down, before them those that drain.
    """
    return sorted(
        workers, key=lambda worker: (worker.name in failed, not worker.up, worker.draining, worker.in_flight_tokens)
    )

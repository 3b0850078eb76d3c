"""Which worker: filter, score, pick. Every rule is one function over plain values."""

from collections.abc import Callable, Iterable, Sequence

from router.workers import Worker

Filter = Callable[[Sequence[Worker]], Sequence[Worker]]
Score = Callable[[Worker], float]


def choose(workers: Iterable[Worker], filters: Sequence[Filter], scores: Sequence[Score], turn: int) -> Worker | None:
    """The worker left by ``filters`` with the best ``scores``, compared in order (higher is better).

    Equal ones take turns, by the running number ``turn``. None if no worker is left.
    """
    left: Sequence[Worker] = list(workers)
    for keep in filters:
        left = keep(left)
    if not left:
        return None
    marks = [tuple(score(worker) for score in scores) for worker in left]
    best = max(marks)
    equal = [worker for worker, mark in zip(left, marks, strict=True) if mark == best]
    return equal[turn % len(equal)]


def is_up(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Those that answer their health probe; all of them when none does.

    A probe can be wrong, and a turn that is tried and fails is no worse than a turn that is not tried.
    """
    return [worker for worker in workers if worker.up] or workers


def not_among(tried: Iterable[str]) -> Filter:
    """Those not tried in this turn yet; all of them when every one was."""
    urls = frozenset(tried)

    def keep(workers: Sequence[Worker]) -> Sequence[Worker]:
        return [worker for worker in workers if worker.url not in urls] or workers

    return keep


def is_at(url: str | None) -> Score:
    """Prefers the worker at ``url``: it holds something of this conversation."""
    return lambda worker: float(worker.url == url)


def least_loaded(worker: Worker) -> float:
    """Prefers the worker with the fewest prompt tokens, then the fewest legs, of ours running on it."""
    return -(worker.in_flight_tokens + worker.in_flight * 1e-3)

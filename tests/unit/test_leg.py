"""What runs on a worker is counted while it runs, however it ends."""

from __future__ import annotations

import pytest

from proxy.leg import Errand, Leg, Reading
from proxy.telemetry import Metrics
from proxy.upstream import Failed, Refused
from router.breaker import Breaker
from router.workers import Role, Worker

URL = "http://d"


def shown(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("turnback_worker_in_flight", {"role": "decode", "worker": URL})


def leg(worker: Worker, metrics: Metrics, tokens: int = 0, now: float = 0.0) -> Leg:
    return Leg(worker, tokens, metrics.in_flight_on(worker.role, worker.name), lambda: now)


def errand(worker: Worker, metrics: Metrics, now: float = 0.0) -> Errand:
    return Errand(worker, 7, metrics.in_flight_on(worker.role, worker.name), lambda: now)


def test_legs_are_counted_while_they_run_and_not_after_a_failure() -> None:
    worker, metrics = Worker(URL, Role.DECODE), Metrics()
    with pytest.raises(ZeroDivisionError), leg(worker, metrics, 100):  # noqa: PT012
        with leg(worker, metrics, 20):
            assert (worker.in_flight, worker.in_flight_tokens, shown(metrics)) == (2, 120, 2)
        assert (worker.in_flight, worker.in_flight_tokens, shown(metrics)) == (1, 100, 1)
        raise ZeroDivisionError
    assert (worker.in_flight, worker.in_flight_tokens, shown(metrics)) == (0, 0, 0)


def test_a_trial_that_tells_nothing_makes_room_for_another() -> None:
    worker, metrics = Worker(URL, Role.DECODE, breaker=Breaker(failures=1, seconds=10.0)), Metrics()
    with leg(worker, metrics) as failing:
        failing.ended(Failed("gone"))
    assert not worker.breaker.allows(5.0)
    with leg(worker, metrics, now=10.0):
        assert not worker.breaker.allows(10.0), "one at a time"
    assert worker.breaker.allows(10.0)
    with leg(worker, metrics, now=10.0) as trial:
        trial.ended("an answer")
    assert worker.breaker.closed


def test_a_4xx_in_between_does_not_hide_that_a_worker_fails_what_it_accepts() -> None:
    worker, metrics = Worker(URL, Role.DECODE, breaker=Breaker(failures=2, seconds=10.0)), Metrics()
    refused = Refused(400, "application/json", b"{}")
    for result in (Failed("gone"), refused, Failed("gone")):
        with leg(worker, metrics) as ended:
            ended.ended(result)
    assert not worker.breaker.closed
    with leg(worker, metrics, now=10.0) as trial:
        trial.ended(refused)
    assert not worker.breaker.closed
    assert worker.breaker.allows(10.0), "another may try"


def test_an_errand_is_counted_and_is_no_trial() -> None:
    worker, metrics = Worker(URL, Role.DECODE, breaker=Breaker(failures=1, seconds=10.0)), Metrics()
    with errand(worker, metrics) as failing:
        assert (worker.in_flight, worker.in_flight_tokens, shown(metrics)) == (1, 7, 1)
        failing.failed()
    with errand(worker, metrics, now=10.0):
        assert worker.breaker.allows(10.0)
    assert worker.breaker.allows(10.0)
    assert not worker.breaker.closed
    assert (worker.in_flight, worker.in_flight_tokens, shown(metrics)) == (0, 0, 0)


def test_a_worker_that_was_removed_and_added_again_is_shown_again() -> None:
    worker, metrics = Worker(URL, Role.DECODE), Metrics()
    with leg(worker, metrics):
        metrics.forget_worker(Role.DECODE, URL)
        assert shown(metrics) is None
    assert shown(metrics) is None, "what still ran on it does not bring it back"
    with leg(worker, metrics):
        assert shown(metrics) == 1


def test_readers_are_counted_on_a_holder_that_is_there() -> None:
    worker = Worker(URL, Role.DECODE)
    with Reading(worker), Reading(None):
        assert worker.readers == 1
    assert worker.readers == 0

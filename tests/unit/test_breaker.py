"""The circuit breaker of one worker. Times are seconds."""

from hypothesis import given
from hypothesis import strategies as st

from router.breaker import Breaker


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, seconds=10.0)
    for _ in range(3):
        breaker.failed(at)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(failures=3, seconds=10.0)
    breaker.failed(0)
    breaker.failed(0)
    assert breaker.allows(0)
    breaker.failed(0)
    assert not breaker.closed
    assert not breaker.allows(9.9)


def test_a_success_between_them_keeps_it_closed() -> None:
    breaker = Breaker(failures=2, seconds=10.0)
    for _ in range(5):
        breaker.failed(0)
        breaker.succeeded()
    assert breaker.closed


def test_half_open_it_lets_one_trial_through() -> None:
    breaker = opened()
    assert breaker.allows(10)
    assert breaker.begin(10)
    assert not breaker.allows(10)
    assert not breaker.allows(1000), "a trial that takes its time is still the only one"


def test_a_trial_that_succeeds_closes_it() -> None:
    breaker = opened()
    breaker.begin(10)
    breaker.succeeded()
    breaker.trial_over()
    assert breaker.closed
    breaker.failed(11)
    assert breaker.allows(11), "counting begins anew"


def test_a_trial_that_fails_opens_it_again_at_once() -> None:
    breaker = opened()
    breaker.begin(10)
    breaker.failed(12)
    breaker.trial_over()
    assert not breaker.allows(21.9)
    assert breaker.allows(22)


def test_a_trial_that_tells_nothing_makes_room_for_the_next() -> None:
    breaker = opened()
    breaker.begin(10)
    breaker.trial_over()
    assert breaker.allows(11)
    assert breaker.begin(11)


def test_legs_that_were_under_way_do_not_prolong_it() -> None:
    breaker = opened()
    for moment in (1, 5, 9):
        breaker.failed(moment)
    assert breaker.allows(10)


def test_a_leg_that_is_sent_although_it_is_open_is_no_trial() -> None:
    """It is sent where every worker's breaker is open."""
    breaker = opened()
    assert not breaker.begin(5)
    assert breaker.allows(10)


def test_a_leg_on_a_closed_one_is_no_trial() -> None:
    assert not Breaker().begin(0)


@given(st.lists(st.sampled_from(["begin", "good", "bad", "over", "wait"]), max_size=60))
def test_it_never_stays_shut_for_good(events: list[str]) -> None:
    breaker, now, trials = Breaker(failures=2, seconds=10.0), 0.0, 0
    for event in events:
        match event:
            case "begin":
                trials += breaker.begin(now)
            case "good":
                breaker.succeeded()
            case "bad":
                breaker.failed(now)
            case "over" if trials:
                breaker.trial_over()
                trials = 0
            case "wait":
                now += 5.0
        assert trials <= 1
    breaker.trial_over()
    assert breaker.allows(now + 10.0)

"""Which worker gets a leg."""

from router.select import choose, is_at, is_up, least_loaded, not_among
from router.workers import Role, Worker


def workers(count: int = 3, **state: object) -> list[Worker]:
    made = [Worker(f"http://w{number}", Role.DECODE, up=True) for number in range(count)]
    for worker in made:
        for name, value in state.items():
            setattr(worker, name, value)
    return made


def test_no_worker_is_no_choice() -> None:
    assert choose([], [is_up], [least_loaded], 0) is None


def test_equal_workers_take_turns() -> None:
    pool = workers()
    assert [choose(pool, [is_up], [least_loaded], turn) for turn in range(6)] == pool * 2


def test_worker_that_is_down_is_left_out() -> None:
    pool = workers()
    pool[1].up = False
    assert [choose(pool, [is_up], [], turn) for turn in range(3)] == [pool[0], pool[2], pool[0]]


def test_all_are_tried_when_every_probe_fails() -> None:
    """A probe can be wrong; not trying is surely no better."""
    pool = workers(up=False)
    assert choose(pool, [is_up], [], 1) is pool[1]


def test_worker_that_failed_in_this_turn_is_not_tried_again() -> None:
    pool = workers()
    assert choose(pool, [is_up, not_among(["http://w0", "http://w2"])], [], 0) is pool[1]


def test_worker_that_failed_is_tried_again_when_there_is_no_other() -> None:
    pool = workers(1)
    assert choose(pool, [is_up, not_among(["http://w0"])], [], 5) is pool[0]


def test_holder_of_the_conversation_is_preferred_to_a_less_loaded_one() -> None:
    pool = workers()
    pool[2].in_flight, pool[2].in_flight_tokens = 5, 50_000
    assert choose(pool, [is_up], [is_at("http://w2"), least_loaded], 0) is pool[2]


def test_holder_that_is_down_is_not_preferred() -> None:
    pool = workers()
    pool[2].up = False
    assert choose(pool, [is_up], [is_at("http://w2"), least_loaded], 0) is pool[0]


def test_no_holder_prefers_nobody() -> None:
    pool = workers()
    assert [choose(pool, [], [is_at(None)], turn) for turn in range(3)] == pool


def test_fewest_tokens_then_fewest_legs() -> None:
    pool = workers()
    pool[0].in_flight_tokens = 100
    pool[1].in_flight, pool[1].in_flight_tokens = 3, 10
    pool[2].in_flight, pool[2].in_flight_tokens = 2, 10
    assert choose(pool, [], [least_loaded], 0) is pool[2]
    pool[2].in_flight = 4
    assert choose(pool, [], [least_loaded], 0) is pool[1]

"""A decode worker that lets go earlier than its setting says is noticed, and nothing else is taken for that."""

import pytest

from router.ttl_watch import FAILURES_THAT_TELL, TtlWatch


def test_failures_older_than_every_success_tell_the_youngest_age() -> None:
    watch = TtlWatch()
    watch.succeeded(20.0)
    assert [watch.failed(age) for age in (60.0, 50.0, 70.0)] == [None, None, 50.0]


def test_told_again_each_time_the_row_is_long_enough() -> None:
    watch = TtlWatch()
    told = [watch.failed(60.0) for _ in range(3 * FAILURES_THAT_TELL)]
    assert told == ([None] * (FAILURES_THAT_TELL - 1) + [60.0]) * 3


def test_failure_younger_than_a_success_is_no_matter_of_age() -> None:
    watch = TtlWatch()
    watch.succeeded(100.0)
    assert [watch.failed(age) for age in (60.0, 100.0, 99.0, 10.0)] == [None] * 4


@pytest.mark.parametrize("age", [60.0, 90.0])
def test_success_as_old_as_the_failures_ends_the_row(age: float) -> None:
    watch = TtlWatch()
    assert [watch.failed(60.0), watch.failed(60.0)] == [None, None]
    watch.succeeded(age)
    assert watch.failed(200.0) is None
    assert watch.failed(200.0) is None
    assert watch.failed(150.0) == 150.0


def test_younger_success_does_not_end_the_row() -> None:
    """That is what a TTL that is too short looks like: young ones work, old ones do not."""
    watch = TtlWatch()
    watch.failed(60.0)
    watch.succeeded(10.0)
    watch.failed(60.0)
    watch.succeeded(12.0)
    assert watch.failed(61.0) == 60.0

"""Probes into up and down."""

from hypothesis import given
from hypothesis import strategies as st

from router.health import Health


def after(probes: str, *, up_after: int = 2, down_after: int = 3) -> Health:
    """The health after good (``+``) and bad (``-``) probes."""
    health = Health(up_after=up_after, down_after=down_after)
    for probe in probes:
        health.good() if probe == "+" else health.bad()
    return health


def test_nothing_is_known_before_the_first_probe() -> None:
    assert (after("").up, after("").down) == (False, False)


def test_the_first_good_probe_is_believed() -> None:
    assert after("+").up
    assert after("--+").up


def test_a_worker_that_never_answered_is_down_after_as_many_probes_as_any() -> None:
    assert not after("--").down
    assert after("---").down


def test_one_bad_probe_takes_nobody_down() -> None:
    assert after("+-").up
    assert after("+--+--+--").up
    assert after("+---").down


def test_one_good_probe_brings_nobody_back() -> None:
    assert after("---+").down
    assert after("---+-+-+").down
    assert after("---++").up


@given(st.text("+-"), st.integers(1, 4), st.integers(1, 4))
def test_it_changes_only_after_an_unbroken_row(probes: str, up_after: int, down_after: int) -> None:
    health = Health(up_after=up_after, down_after=down_after)
    was_up = was_down = False
    for end, probe in enumerate(probes, 1):
        health.good() if probe == "+" else health.bad()
        assert not (health.up and health.down)
        if health.down and not was_down:
            assert probes[:end].endswith("-" * down_after)
        if health.up and was_down:
            assert probes[:end].endswith("+" * up_after)
        assert not (was_up and not health.up) or probes[:end].endswith("-" * down_after)
        was_up, was_down = health.up, health.down

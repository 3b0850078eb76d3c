"""Waits, one after the other, none of which may take too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from proxy.gap import GapWatch


@dataclass
class Timer:
    when: float
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        self.callback = None


@dataclass
class Loop:
    """Its time passes when it is told so."""

    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def pass_to(self, now: float) -> None:
        while due := [timer for timer in self.timers if timer.callback is not None and timer.when <= now]:
            first = min(due, key=lambda timer: timer.when)
            self.now = max(self.now, first.when)
            callback, first.callback = first.callback, None
            assert callback is not None
            callback()
        self.now = now


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr("proxy.gap.asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    return loop


@pytest.fixture
def stalls() -> list[str]:
    return []


@pytest.fixture
def gap(loop: Loop, stalls: list[str]) -> GapWatch:
    """Ten seconds."""
    return GapWatch(10, lambda: stalls.append("stalled"))


def test_a_wait_that_takes_too_long_is_told_once(gap: GapWatch, loop: Loop, stalls: list[str]) -> None:
    gap.begin()
    loop.pass_to(9.9)
    assert not stalls
    loop.pass_to(10)
    loop.pass_to(100)
    assert stalls == ["stalled"]


def test_waits_that_end_in_time_are_not_told_however_long_they_take_together(
    gap: GapWatch, loop: Loop, stalls: list[str]
) -> None:
    for begin in range(0, 100, 9):
        loop.pass_to(begin)
        gap.begin()
        loop.pass_to(begin + 8.9)
        gap.end()
    assert not stalls
    assert len(loop.timers) <= 100 / 8.9 + 1, "one timer at a time, and none for each wait"
    gap.begin()
    loop.pass_to(loop.now + 10)
    assert stalls


def test_short_waits_in_a_row_cost_one_timer(gap: GapWatch, loop: Loop) -> None:
    for moment in range(9):
        loop.pass_to(moment)
        gap.begin()
        gap.end()
    assert len(loop.timers) == 1


def test_what_lies_between_two_waits_does_not_count_and_the_next_is_watched_again(
    gap: GapWatch, loop: Loop, stalls: list[str]
) -> None:
    gap.begin()
    gap.end()
    loop.pass_to(1000)
    assert not stalls
    gap.begin()
    loop.pass_to(1010)
    assert stalls


def test_who_never_waits_needs_no_timer(gap: GapWatch, loop: Loop) -> None:
    gap.allow(5)
    gap.stop()
    assert not loop.timers


@pytest.mark.parametrize("waiting", [True, False])
def test_another_time_counts_at_once(waiting: bool, gap: GapWatch, loop: Loop, stalls: list[str]) -> None:
    if waiting:
        gap.begin()
    gap.allow(20)
    gap.allow(2)
    if not waiting:
        gap.begin()
    loop.pass_to(1.9)
    assert not stalls
    loop.pass_to(2)
    assert stalls
    assert gap.seconds == 2


def test_a_longer_time_counts_at_once(gap: GapWatch, loop: Loop, stalls: list[str]) -> None:
    gap.begin()
    gap.allow(30)
    loop.pass_to(29)
    assert not stalls
    loop.pass_to(30)
    assert stalls


def test_nothing_is_told_after_the_stop(gap: GapWatch, loop: Loop, stalls: list[str]) -> None:
    gap.begin()
    gap.stop()
    loop.pass_to(1000)
    assert not stalls

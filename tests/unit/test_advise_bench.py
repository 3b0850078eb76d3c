"""A bench result becomes evidence, by hand."""

from __future__ import annotations

import pytest

from bench.advise.evidence import OutcomeCount, Pair, Point
from bench.advise.from_bench import from_bench
from bench.result import Retained
from tests.unit.advise_cases import result, turn

TURNS = [
    turn("off", 0, 1, 0.5, started_seconds=0.0),
    turn("on", 0, 1, 0.5, started_seconds=2.0),
    turn("off", 0, 2, 0.9, started_seconds=10.0),
    turn("on", 0, 2, 0.3, started_seconds=12.0, pause_seconds=8.0, turn_seconds=1.0),
    turn("on", 0, 3, 0.2, started_seconds=20.0, phase="past_ttl", pause_seconds=600.0),
    turn("on", 1, 1, 0.2, started_seconds=1.0, phase="warmup"),
]


def test_only_the_main_phase_counts() -> None:
    seen = from_bench(result(TURNS), "a test")
    assert set(seen.outcomes) == {OutcomeCount("first", "nothing_stored", 1), OutcomeCount("hit", "all_held", 1)}
    assert (seen.pauses.count, seen.pauses.longest) == (1, 8.0)
    # Two turns with reuse from 2 s to 13 s, of 1,100 and 2,100 tokens.
    assert seen.turns_per_second == pytest.approx(2 / 11)
    assert seen.tokens_per_entry == 1600
    assert seen.pairs == (Pair(0, "1k-2k", 0.9, 0.3),)
    assert seen.points == (
        Point(1000, 0, 0.5), Point(1000, 0, 0.5), Point(2000, 0, 0.9), Point(1000, 1000, 0.3),
    )  # fmt: skip
    assert seen.points_are == "first tokens"


def test_memory_is_the_most_that_was_held_by_all_workers_at_once() -> None:
    retained = [
        Retained(at_seconds=1, worker="a", entries=1, tokens=900, share=0.9),
        Retained(at_seconds=1, worker="b", entries=1, tokens=100, share=0.1),
        Retained(at_seconds=2, worker="a", entries=2, tokens=600, share=0.6),
        Retained(at_seconds=2, worker="b", entries=3, tokens=700, share=0.7),
    ]
    seen = from_bench(result(TURNS, retained=retained, kv_capacity_tokens={"a": 1000, "b": 1000}), "a test")
    assert seen.held is not None
    assert (seen.held.entries, seen.held.tokens, seen.held.share) == (5, 1300, 0.7)
    assert seen.capacity_tokens == 2000


def test_what_the_server_does_not_tell_is_left_out() -> None:
    bare = [
        turn("only", 0, number, 0.5, prompt_tokens=None, output_tokens=None, outcome=None, reason=None)
        for number in (1, 2)
    ]
    seen = from_bench(result(bare, arms=["only"]), "a test")
    assert (seen.outcomes, seen.points, seen.pairs) == ((), (), ())
    assert (seen.tokens_per_entry, seen.capacity_tokens, seen.held) == (None, None, None)


def test_an_empty_result_is_no_evidence() -> None:
    seen = from_bench(result([], arms=[]), "a test")
    assert (seen.turns, seen.turns_per_second, seen.pauses.count) == (0, None, 0)

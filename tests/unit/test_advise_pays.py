"""Whether reuse pays, on first tokens whose answer is known."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.advise.evidence import Evidence, OutcomeCount, Pair
from bench.advise.from_bench import from_bench
from bench.advise.pays import advise_pays
from tests.unit.advise_cases import cells, evidence, result, turn


def pairs(gain: float, noise: float, conversations: int, seed: int = 1) -> tuple[Pair, ...]:
    """Three later turns each, 1 s without reuse, ``gain`` less with it; either scatters by ``noise``."""
    chance = random.Random(seed)
    return tuple(
        Pair(conversation, "2k-4k", 1 + chance.gauss(0, noise), 1 - gain + chance.gauss(0, noise))
        for conversation in range(conversations)
        for _ in range(3)
    )


def bench(*made: Pair) -> Evidence:
    return evidence(kind="bench", pairs=made, outcomes=(OutcomeCount("hit", "all_held", len(made)),))


def test_a_clear_gain_is_a_yes_with_its_size() -> None:
    advice = advise_pays(bench(*pairs(0.4, 0.1, 40)))
    assert advice.verdict == "yes"
    assert advice.low is not None
    assert advice.high is not None
    assert advice.low < 0.4 < advice.high
    assert advice.high - advice.low < 0.1
    assert advice.share == pytest.approx(0.4, abs=0.05)


def test_a_loss_is_a_no() -> None:
    advice = advise_pays(bench(*pairs(-0.2, 0.1, 40)))
    assert (advice.verdict, advice.why) == ("no", "measured")
    assert advice.gain is not None
    assert advice.gain < 0


def test_no_difference_is_a_no_once_that_is_sure() -> None:
    assert advise_pays(bench(*pairs(0.0, 0.02, 100))).verdict == "no"


def test_a_gain_within_the_noise_cannot_be_told_and_how_many_turns_would_tell() -> None:
    advice = advise_pays(bench(*pairs(0.05, 0.5, 15)))
    assert advice.verdict == "cannot tell"
    assert advice.more_turns is not None
    # 2 · 0.5² · (1.96 / 0.05)² pairs are 768 for a gain that came out right; here within an order.
    assert 20 < advice.more_turns < 8000


def test_a_loss_within_the_noise_is_not_yet_a_no() -> None:
    advice = advise_pays(bench(*pairs(-0.1, 0.8, 10)))
    assert advice.low is not None
    assert advice.high is not None
    assert advice.low < -0.1 < 0.1 < advice.high
    assert advice.verdict == "cannot tell"


def test_few_pairs_cannot_tell_however_clear() -> None:
    advice = advise_pays(bench(*pairs(0.5, 0.001, 3)))
    assert (advice.verdict, advice.why, advice.more_turns) == ("cannot tell", "too few turns", 1)


def test_nothing_to_compare_with() -> None:
    for seen in (evidence(), evidence(cells=cells([], [0.1, 0.2]))):
        advice = advise_pays(seen)
        assert (advice.verdict, advice.why) == ("cannot tell", "nothing to compare with")


def test_routers_turns_are_compared_within_their_class() -> None:
    """Reused ones are longer, so that over all classes they would look slower."""
    made = cells([0.1, 0.4, 1.6], [0.08, 0.3, 1.2])
    few = [cell if cell.reused is (cell.context == "4k-8k") else _with(cell, count=10) for cell in made]
    advice = advise_pays(evidence(cells=tuple(few), outcomes=(OutcomeCount("hit", "all_held", 130),)))
    assert advice.verdict == "yes"
    assert advice.gain == pytest.approx((10 * 0.02 + 10 * 0.1 + 100 * 0.4) / 120)


def _with(cell: Any, **changed: Any) -> Any:
    return type(cell)(**{**{name: getattr(cell, name) for name in cell.__dataclass_fields__}, **changed})


def test_classes_without_both_kinds_are_left_out_and_too_many_of_them_forbid_an_answer() -> None:
    made = cells([0.4], [0.1, 0.2], count=100)
    assert [row.context for row in advise_pays(evidence(cells=made)).rows] == ["1k-2k"]
    most = tuple(_with(cell, count=1000) if cell.context == "2k-4k" else cell for cell in made)
    assert advise_pays(evidence(cells=most)).verdict == "cannot tell"


def test_token_ids_asked_for_in_vain_are_paid_for() -> None:
    seen = evidence(
        cells=cells([0.5], [0.4]),
        outcomes=(OutcomeCount("hit", "all_held", 100), OutcomeCount("diverged", "other_tokens", 400)),
        renders=500,
        render_seconds=0.03,
    )
    advice = advise_pays(seen)
    # Each of the hundred gains 0.1 s, and four others lost 0.03 s each.
    assert advice.gain == pytest.approx(0.1 - 0.12)
    assert advice.verdict == "no"


@pytest.mark.parametrize(("outcome", "reason"), [("none", "no_id"), ("diverged", "other_tokens"), ("first", "x")])
def test_hardly_any_reuse_is_a_no_and_says_why(outcome: str, reason: str) -> None:
    seen = evidence(
        cells=cells([0.5], [0.1], count=10),
        outcomes=(OutcomeCount("hit", "all_held", 10), OutcomeCount(outcome, reason, 990)),
    )
    advice = advise_pays(seen)
    assert (advice.verdict, advice.why) == ("no", "hardly anything is reused")
    assert advice.instead == (outcome, reason)
    assert advice.reusing == pytest.approx(0.01)


def test_a_bench_is_compared_turn_by_turn_and_only_its_later_complete_turns() -> None:
    turns = []
    for conversation in range(10):
        for number in (1, 2, 3):
            turns.append(turn("off", conversation, number, 1.0))
            turns.append(turn("on", conversation, number, 1.0 if number == 1 else 0.25))
        # None of these counts.
        turns.append(turn("off", conversation, 4, 0.1, phase="warmup"))
        turns.append(turn("on", conversation, 4, 9.0, phase="warmup"))
        turns.append(turn("off", conversation, 5, 0.1))
        turns.append(turn("on", conversation, 5, 9.0, error="broke off"))
        turns.append(turn("on", conversation, 6, 9.0, phase="past_ttl", outcome="expired"))
    advice = advise_pays(from_bench(result(turns), "a test"))
    assert (advice.verdict, advice.compared) == ("yes", 20)
    assert advice.gain == pytest.approx(0.75)
    assert [(row.context, row.turns_on, row.off, row.on) for row in advice.rows] == [
        ("1k-2k", 10, 1.0, 0.25),
        ("2k-4k", 10, 1.0, 0.25),
    ]


def test_one_arm_alone_cannot_tell() -> None:
    turns = [turn("only", conversation, 2, 1.0, outcome=None, reason=None) for conversation in range(30)]
    assert advise_pays(from_bench(result(turns, arms=["only"]), "a test")).why == "nothing to compare with"

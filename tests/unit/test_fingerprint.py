"""A fingerprint tells a common prefix: never more than is true, and to within ``STEP`` tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fingerprint import (
    COARSE_STEP,
    DIGEST_BYTES,
    STEP,
    Scope,
    common_prefix,
    fingerprint,
    outline,
    tokens_in_common,
)

SCOPE = Scope(secret=b"s" * 32, model="model", cache_salt="salt")

tokens = st.one_of(
    st.lists(st.integers(0, 1), max_size=80),
    st.lists(st.integers(0, 2**32 - 1), max_size=80),
    st.builds(
        lambda seed, size: [random.Random(seed).randrange(50_000) for _ in range(size)],
        st.integers(0, 99),
        st.integers(0, 600),
    ),
)


def true_common(held: list[int], prompt: list[int]) -> int:
    count = 0
    for one, other in zip(held, prompt, strict=False):
        if one != other:
            break
        count += 1
    return count


@given(tokens, tokens)
def test_never_more_than_the_true_common_prefix(held: list[int], prompt: list[int]) -> None:
    common = common_prefix(fingerprint(held, SCOPE), prompt, SCOPE)
    truth = true_common(held, prompt)
    assert common <= truth
    assert truth - common < STEP


@given(tokens, tokens)
def test_all_held_is_found_when_it_begins_the_prompt(held: list[int], more: list[int]) -> None:
    assert common_prefix(fingerprint(held, SCOPE), held + more, SCOPE) == len(held)


@given(tokens, st.data())
def test_one_changed_token_ends_the_prefix_before_it(held: list[int], data: st.DataObject) -> None:
    if not held:
        return
    place = data.draw(st.integers(0, len(held) - 1))
    changed = [*held[:place], (held[place] + 1) % 2**32, *held[place + 1 :], 5]
    assert common_prefix(fingerprint(held, SCOPE), changed, SCOPE) == place - place % STEP


@given(tokens, st.data())
def test_shorter_prompt_shares_its_whole_steps(held: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(held)))
    expected = len(held) if size == len(held) else size - size % STEP
    assert common_prefix(fingerprint(held, SCOPE), held[:size], SCOPE) == expected


@pytest.mark.parametrize(
    "other",
    [
        Scope(secret=b"t" * 32, model="model", cache_salt="salt"),
        Scope(secret=b"s" * 32, model="other", cache_salt="salt"),
        Scope(secret=b"s" * 32, model="model", cache_salt=""),
        # The same letters, cut in another place.
        Scope(secret=b"s" * 32, model="models", cache_salt="alt"),
        Scope(secret=b"s" * 32, model="modelsalt", cache_salt=""),
    ],
)
@pytest.mark.parametrize("size", [5, STEP, 100])
def test_equal_tokens_in_another_scope_share_nothing(other: Scope, size: int) -> None:
    held = list(range(size))
    assert common_prefix(fingerprint(held, SCOPE), held, other) == 0


@pytest.mark.parametrize(
    ("size", "digests"), [(0, 0), (1, 1), (STEP, 1), (STEP + 1, 2), (2048, 128), (2049, 129), (24_000, 225)]
)
def test_size_is_one_digest_a_step_and_few_before_the_tail(size: int, digests: int) -> None:
    print_ = fingerprint(list(range(size)), SCOPE)
    assert (print_.tokens, len(print_.chain)) == (size, digests * DIGEST_BYTES)


def test_equal_step_after_another_beginning_has_another_digest() -> None:
    """A chain: a digest says what came before it too."""
    one = fingerprint([1] * STEP + [7] * STEP, SCOPE)
    other = fingerprint([2] * STEP + [7] * STEP, SCOPE)
    assert one.chain[DIGEST_BYTES:] != other.chain[DIGEST_BYTES:]


@pytest.mark.parametrize("impossible", [-1, 2**32, 2**70])
def test_prompt_with_an_impossible_token_is_compared_up_to_it(impossible: int) -> None:
    """A client may send token ids itself, and what is wrong with them the engine tells best."""
    held = list(range(3 * STEP))
    prompt = [*held[: 2 * STEP + 3], impossible, *held]
    assert common_prefix(fingerprint(held, SCOPE), prompt, SCOPE) == 2 * STEP


@pytest.mark.parametrize("impossible", [-1, 2**32])
def test_impossible_tokens_have_no_fingerprint(impossible: int) -> None:
    with pytest.raises(OverflowError):
        fingerprint([1, impossible], SCOPE)


@given(tokens, tokens, st.integers(0, 600))
def test_outline_never_tells_more_than_is_common(one: list[int], other: list[int], shared: int) -> None:
    other = one[:shared] + other
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    told = tokens_in_common(outline(fingerprint(one, SCOPE)), fingerprint(other, SCOPE))
    assert told <= common
    assert told > common - 256
    if common == len(one):
        assert told == len(one) // STEP * STEP


@pytest.mark.parametrize(("size", "marks"), [(15, 0), (16, 1), (256, 1), (272, 2), (512, 2), (24_000, 94)])
def test_outline_is_one_mark_in_256_tokens_and_one_at_the_end(size: int, marks: int) -> None:
    assert len(outline(fingerprint(list(range(size)), SCOPE)).marks) == 8 * marks


@pytest.mark.parametrize("size", [2048, 2304, 5000, 24_007])
def test_long_histories_are_told_finely_at_their_end_and_coarsely_before(size: int) -> None:
    held = [place % 50_000 for place in range(size)]
    print_ = fingerprint(held, SCOPE)
    for place in (0, 255, 256, size - 2305, size - 2048, size - 2047, size - 17, size - 1):
        if place < 0:
            continue
        changed = [*held[:place], 77_777, *held[place + 1 :], 1, 2]
        step = STEP if place >= size - 2048 else COARSE_STEP
        common = common_prefix(print_, changed, SCOPE)
        assert place - step < common <= place
        told = tokens_in_common(outline(print_), fingerprint(changed, SCOPE))
        assert place - COARSE_STEP < told <= place
    assert common_prefix(print_, [*held, 1], SCOPE) == size
    much_longer = fingerprint([*held, *range(4000)], SCOPE)
    assert size - COARSE_STEP < tokens_in_common(outline(print_), much_longer) <= size

"""Which entries are given up so that running requests have room: the oldest, enough, and no more than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata_store import Holding
from router.room import LONGEST_ANSWER_TOKENS, Cache, idle, over_budget, over_share, retained_blocks, to_free


def holding(stored_at: float, blocks: int, tokens: int = 0) -> Holding:
    return Holding("http://d", "1", tokens, blocks, 1, stored_at, stored_at + 480)


ENTRIES = {"old": holding(1, 4, 64), "middle": holding(2, 6, 96), "new": holding(3, 2, 32)}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [(-3, []), (0, []), (1, ["old"]), (4, ["old"]), (5, ["old", "middle"]), (99, ["old", "middle", "new"])],
)
def test_the_oldest_go_first_and_no_more_than_needed(blocks: int, expected: list[str]) -> None:
    assert to_free(ENTRIES, blocks) == expected


def test_a_share_of_the_cache() -> None:
    assert over_share(ENTRIES, Cache(24, 16), 0.5) == []
    assert over_share(ENTRIES, Cache(24, 16), 0.34) == ["old"]
    assert over_share(ENTRIES, Cache(10, 16), 0.1) == ["old", "middle", "new"]


def test_a_budget_of_tokens() -> None:
    assert over_budget(ENTRIES, 192) == []
    assert over_budget(ENTRIES, 191) == ["old"]
    assert over_budget(ENTRIES, 0) == ["old", "middle", "new"]


def test_who_is_idle() -> None:
    assert idle(ENTRIES, now=12.5, seconds=10) == ["old", "middle"]


def test_what_a_request_needs() -> None:
    cache = Cache(100, 16)
    assert cache.needed(160, 16) == 12
    assert cache.needed(160, None) == 27
    assert cache.needed(160, 10**9) == cache.needed(160, LONGEST_ANSWER_TOKENS)


@given(
    st.dictionaries(st.text(max_size=3), st.builds(holding, st.floats(0, 1e6), st.integers(0, 50)), max_size=20),
    st.integers(-10, 600),
)
def test_enough_is_freed_if_there_is_enough_and_one_less_would_not_do(entries: dict[str, Holding], blocks: int) -> None:
    chosen = to_free(entries, blocks)
    freed = sum(entries[key].blocks for key in chosen)
    assert freed >= min(blocks, retained_blocks(entries))
    assert not chosen or freed - entries[chosen[-1]].blocks < blocks
    left = [entries[key].stored_at for key in entries.keys() - set(chosen)]
    assert all(entries[key].stored_at <= min(left, default=1e9) for key in chosen)

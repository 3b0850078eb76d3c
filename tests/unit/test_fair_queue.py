"""Who is next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.fair_queue import FairQueue

CALLERS = st.sampled_from("abcd")


def drained(queue: FairQueue[str]) -> list[str]:
    """All that waits, in its order."""
    found = []
    while (item := queue.next()) is not None:
        found.append(item)
    return found


def filled(size: int, *items: str) -> FairQueue[str]:
    """An item's caller is its first letter."""
    queue: FairQueue[str] = FairQueue(size)
    for item in items:
        assert queue.add(item[0], item) is None
    return queue


def test_callers_take_turns_and_each_keeps_its_order() -> None:
    assert drained(filled(9, "a1", "a2", "a3", "b1", "b2", "c1")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_was_just_served_comes_last() -> None:
    queue = filled(9, "a1", "a2", "b1")
    assert queue.next() == "a1"
    assert queue.add("c", "c1") is None
    assert drained(queue) == ["b1", "a2", "c1"]


def test_nothing_waits_in_a_queue_without_room() -> None:
    queue: FairQueue[str] = FairQueue(0)
    assert queue.add("a", "a1") == "a1"
    assert not queue
    assert queue.next() is None


def test_one_caller_fills_the_queue_for_itself_only() -> None:
    queue = filled(3, "a1", "a2", "a3")
    assert queue.add("a", "a4") == "a4"
    assert queue.add("b", "b1") == "a3"
    assert drained(queue) == ["a1", "b1", "a2"]


def test_nobody_gives_way_to_one_who_would_then_have_as_many_or_more() -> None:
    queue = filled(3, "a1", "a2", "b1")
    assert queue.add("b", "b2") == "b2"
    assert queue.add("c", "c1") == "a2"
    assert queue.add("d", "d1") == "d1"


def test_what_is_taken_out_is_gone_and_its_room_is_free() -> None:
    queue = filled(2, "a1", "b1")
    queue.discard("a", "a1")
    queue.discard("a", "a1")
    queue.discard("c", "b1")
    assert len(queue) == 1
    assert queue.add("c", "c1") is None
    assert drained(queue) == ["b1", "c1"]


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(["add", "next", "discard"]), CALLERS)))
def test_it_never_loses_an_item_nor_holds_more_than_its_size(size: int, steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[str] = FairQueue(size)
    waiting: dict[str, list[str]] = {}
    for number, (step, caller) in enumerate(steps):
        mine = waiting.setdefault(caller, [])
        if step == "add":
            item = f"{caller}{number}"
            mine.append(item)
            out = queue.add(caller, item)
            if out is not None:
                waiting[out[0]].remove(out)
        elif step == "next":
            out = queue.next()
            assert (out is None) == (not any(waiting.values()))
            if out is not None:
                assert waiting[out[0]].pop(0) == out
        elif mine:
            queue.discard(caller, mine.pop())
        assert len(queue) == sum(map(len, waiting.values())) <= size
    assert sorted(drained(queue)) == sorted(item for items in waiting.values() for item in items)


@given(st.lists(CALLERS, min_size=1))
def test_nobody_is_served_twice_while_another_waits(callers: list[str]) -> None:
    queue = filled(len(callers), *(f"{caller}{number}" for number, caller in enumerate(callers)))
    order = [item[0] for item in drained(queue)]
    for place, caller in enumerate(order):
        again = order.index(caller, place + 1) if caller in order[place + 1 :] else None
        if again is not None:
            assert set(order[again:]) <= set(order[place:again])

"""A prompt's ids in their two forms tell the same, or that they do not."""

from __future__ import annotations

import msgspec
import pytest

from proxy.token_ids import TokenIds


def array(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


@pytest.mark.parametrize("told", ["[1,2,3]", "[1, 2, 3]", " [1,2,\n3]"])
def test_the_same_ids_are_told_in_any_spelling(told: str) -> None:
    assert TokenIds.of([1, 2, 3]).are(array(told))
    assert TokenIds(array("[1,2,3]")).are(array(told))


@pytest.mark.parametrize("told", ["[1,2]", "[1,2,3,4]", "[1,2,4]", '[1,2,"3"]', "[1,2,null]", '"123"', "{}", "[1,2,"])
def test_other_ids_and_what_is_no_list_of_ids_are_not_the_same(told: str) -> None:
    assert not TokenIds.of([1, 2, 3]).are(array(told))
    assert not TokenIds.read(array("[1,2,3]")).are(array(told))

"""Which conversation a request belongs to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.body import parse
from proxy.conversation import LONGEST_ID, conversation_id
from proxy.errors import ApiError
from proxy.settings import CONVERSATION_ID_SOURCES

ALL_HEADERS = {"x-conversation-id": "header", "x-session-id": "session"}
ALL_MEMBERS = {"conversation_id": "body", "metadata": {"conversation_id": "metadata"}, "prompt_cache_key": "cache"}


def found(headers: dict[str, str], members: dict[str, Any], sources: tuple[str, ...] = CONVERSATION_ID_SOURCES) -> Any:
    return conversation_id(sources, headers, parse(json.dumps(members).encode()))


def test_first_that_is_there_counts() -> None:
    headers, members = dict(ALL_HEADERS), dict(ALL_MEMBERS)
    assert found(headers, members) == "header"
    del headers["x-conversation-id"]
    assert found(headers, members) == "body"
    del members["conversation_id"]
    assert found(headers, members) == "metadata"
    del members["metadata"]
    assert found(headers, members) == "cache"
    del members["prompt_cache_key"]
    assert found(headers, members) == "session"
    assert found({}, members) is None


@pytest.mark.parametrize("empty", ["", None])
def test_empty_id_is_none(empty: str | None) -> None:
    assert found({"x-conversation-id": ""}, {"conversation_id": empty, "prompt_cache_key": "cache"}) == "cache"


@pytest.mark.parametrize("metadata", [None, "text", [], 5, {}, {"conversation_id": None}])
def test_metadata_without_an_id_is_passed_over(metadata: Any) -> None:
    assert found({"x-session-id": "session"}, {"metadata": metadata}) == "session"


def test_order_is_a_setting() -> None:
    sources = ("header:X-Session-Id", "body:my.id", "body:prompt_cache_key")
    assert found(ALL_HEADERS, ALL_MEMBERS, sources) == "session"
    assert found({}, ALL_MEMBERS | {"my": {"id": "mine"}}, sources) == "mine"
    assert found({}, ALL_MEMBERS, ()) is None


@pytest.mark.parametrize("wrong", [5, 1.5, True, ["a"], {"a": 1}])
@pytest.mark.parametrize("name", ["conversation_id", "prompt_cache_key"])
def test_id_that_is_no_text_is_refused_by_name(wrong: Any, name: str) -> None:
    with pytest.raises(ApiError) as raised:
        found({}, {name: wrong})
    assert (raised.value.status, raised.value.param) == (400, name)


def test_id_inside_metadata_that_is_no_text_is_refused_by_name() -> None:
    with pytest.raises(ApiError) as raised:
        found({}, {"metadata": {"conversation_id": 7}})
    assert (raised.value.status, raised.value.param) == (400, "metadata.conversation_id")


def test_longest_id_is_taken_and_a_longer_one_refused() -> None:
    assert found({"x-conversation-id": "x" * LONGEST_ID}, {}) == "x" * LONGEST_ID
    for headers, members in [
        ({"x-conversation-id": "x" * (LONGEST_ID + 1)}, {}),
        ({}, {"conversation_id": "x" * (LONGEST_ID + 1)}),
    ]:
        with pytest.raises(ApiError) as raised:
            found(headers, members)
        assert raised.value.status == 400


def test_id_that_counts_less_is_not_looked_at() -> None:
    assert found({"x-conversation-id": "good"}, {"conversation_id": 5}) == "good"

"""The engine's parameters go on as they came, but for what says how much to reuse."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.kv_params import KvParams, MalformedParams, Members, first_turn

RETAINED: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[5, 6, 7, 9]],
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "10.1.2.3",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 50,
    "remote_blocks_expiry_time": 1234.5,
    "transfer_mode": "read",
}


def params(**changes: Any) -> KvParams:
    return KvParams(msgspec.json.encode(RETAINED | changes))


def as_json(members: Members) -> Any:
    return msgspec.json.decode(msgspec.json.encode(members))


def test_first_turn_asks_prefill_to_keep_the_blocks() -> None:
    assert as_json(first_turn()) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_first_turn_is_a_fresh_object_every_time() -> None:
    first_turn()["remote_host"] = msgspec.Raw(b'"x"')
    assert as_json(first_turn())["remote_host"] is None


def test_whole_is_what_decode_sent() -> None:
    assert as_json(params().whole()) == RETAINED


def test_direction_is_that_of_a_prefill_leg_whatever_decode_sent() -> None:
    turned = params(do_remote_prefill=True, do_remote_decode=False)
    for members in (turned.whole(), turned.cut(20, 16), turned.nothing()):
        assert as_json(members)["do_remote_decode"] is True
        assert as_json(members)["do_remote_prefill"] is False


@pytest.mark.parametrize(
    ("tokens", "block_size", "blocks"),
    [(1, 16, [5]), (16, 16, [5]), (17, 16, [5, 6]), (50, 16, [5, 6, 7, 9]), (3, 1, [5, 6, 7]), (50, 128, [5])],
)
def test_cut_trims_number_and_list_and_nothing_else(tokens: int, block_size: int, blocks: list[int]) -> None:
    expected = RETAINED | {"remote_num_tokens": tokens, "remote_block_ids": [blocks]}
    assert as_json(params().cut(tokens, block_size)) == expected


def test_members_of_newer_engines_go_on_byte_for_byte() -> None:
    data = msgspec.json.encode(RETAINED)[:-1] + b',"new": {"a":0.70, "b" : 12345678901234567890123, "c":"\\u00e4"}}'
    for members in (KvParams(data).whole(), KvParams(data).cut(20, 16), KvParams(data).nothing()):
        assert bytes(members["new"]) == b'{"a":0.70, "b" : 12345678901234567890123, "c":"\\u00e4"}'


@pytest.mark.parametrize("groups", [[[5, 6]], [[5, 6], [7]], [[5], [], [6]]])
def test_release_reads_no_block_and_keeps_the_number_of_groups(groups: list[list[int]]) -> None:
    released = as_json(params(remote_block_ids=groups).nothing())
    assert released == RETAINED | {"remote_num_tokens": 0, "remote_block_ids": [[] for _ in groups]}


@pytest.mark.parametrize("changes", [{"remote_block_ids": [[1], [2]]}, {"dcp_size": 2}, {"remote_block_ids": None}])
def test_what_cannot_be_cut_is_not_cut(changes: dict[str, Any]) -> None:
    held = params(**changes)
    assert not held.cuttable
    with pytest.raises(ValueError, match="cut"):
        held.cut(16, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[1, 2], []]},
        {"remote_num_tokens": 0},
        {"remote_num_tokens": -5},
        *({name: None} for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")),
    ],
)
def test_parameters_by_which_the_engine_would_read_nothing_are_not_readable(changes: dict[str, Any]) -> None:
    assert params().readable
    assert not params(**changes).readable


@pytest.mark.parametrize(
    ("groups", "dcp_size", "listed"),
    [
        ([[1, 2, 3, 4]], 1, True),
        ([[1, 2, 3, 4, 5]], 1, True),
        ([[1, 2, 3]], 1, False),
        ([[1, 2, 3, 4], [8, 9]], 1, True),
        ([[8, 9], [1, 2, 3, 4]], 1, True),
        ([[1, 2, 3, 4, 5], [8, 9]], 1, False),
        ([[1, 2, 3], [8, 9]], 1, False),
        ([[1, 2]], 2, True),
        ([[1]], 2, False),
        ([[1, 2, 3]], 2, False),
        ([[1, 2], [8]], 2, False),
    ],
)
def test_block_lists_must_fit_the_tokens(groups: list[list[int]], dcp_size: int, listed: bool) -> None:
    assert params(remote_block_ids=groups, dcp_size=dcp_size).all_listed(16) is listed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.one_of(
        st.binary(),
        json_values.map(msgspec.json.encode),
        st.builds(
            lambda name, value: msgspec.json.encode(RETAINED | {name: value}), st.sampled_from([*RETAINED]), json_values
        ),
    )
)
@example(b'{"remote_host":"\xff"}')
@example(b'{"x":' + b"[" * 3000)
@example(b'{"remote_num_tokens":1e999}')
def test_bytes_that_are_no_parameters_are_malformed_and_no_other_error(data: bytes) -> None:
    try:
        found = KvParams(data)
    except MalformedParams:
        return
    assert isinstance(found.tokens, int)
    assert as_json(found.nothing())["remote_num_tokens"] == 0

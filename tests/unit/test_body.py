"""What a client sends reaches the engine as it was sent, but for the members that are changed."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.body import NotAnObject, dump, parse, raw, read

AS_THEY_CAME = [
    "0.70",
    "1.0",
    "1e400",
    "-1E-400",
    "12345678901234567890123",
    "-0",
    "0.1000000000000000055511151231257827",
    '"\\u00e4\\ud83d\\ude00\\/"',
    '"ä \N{GRINNING FACE}"',
    '{"a" : [1,  2 ], "a": 3}',
    "[ ]",
    "null",
    "true",
]


@pytest.mark.parametrize("value", AS_THEY_CAME)
def test_value_keeps_its_bytes(value: str) -> None:
    data = dump(parse(b'{ "model" : "m", "unknown": ' + value.encode() + b" }"))
    assert data == b'{"model":"m","unknown":' + value.encode() + b"}"


def test_members_keep_their_order_and_a_changed_one_its_place() -> None:
    members = parse(b'{"z":1,"a":2,"m":3}')
    members["a"] = raw([1])
    assert dump(members) == b'{"z":1,"a":[1],"m":3}'


def test_of_a_member_that_is_there_twice_the_last_counts_as_in_the_engine() -> None:
    data = b'{"stream":true,"model":"m","stream":false}'
    assert read(parse(data), "stream", bool) is json.loads(data)["stream"] is False
    assert dump(parse(data)).count(b"stream") == 1


def test_escaped_name_is_the_same_member() -> None:
    """Else a private member could come through in disguise."""
    assert read(parse(b'{"kv_transfer_p\\u0061rams":1}'), "kv_transfer_params", int) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b"{",
        b'{"a":}',
        b'{"a":1}x',
        b"{'a':1}",
        b'{"a":1,}',
        b"{1:2}",
        b'{"a":NaN}',
        b'{"\xff":1}',
        b"\xef\xbb\xbf{}",
        b"[" * 3000,
        b'{"a":' + b"[" * 200_000,
    ],
)
def test_what_is_no_object_is_told_so_and_no_other_error(data: bytes) -> None:
    with pytest.raises(NotAnObject) as raised:
        parse(data)
    assert str(raised.value)


@given(st.binary())
def test_no_bytes_at_all_raise_another_error(data: bytes) -> None:
    try:
        members = parse(data)
    except NotAnObject:
        return
    assert json.loads(dump(members)).keys() == json.loads(data).keys()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values), st.sampled_from([(",", ":"), (", ", " : ")]), st.booleans())
def test_every_object_means_the_same_after(
    value: dict[str, object], separators: tuple[str, str], escaped: bool
) -> None:
    try:
        data = json.dumps(value, separators=separators, ensure_ascii=escaped).encode()
    except UnicodeEncodeError:
        return
    try:
        members = parse(data)
    except NotAnObject:
        # Lone surrogates, which are no text.
        assert "\\ud" in json.dumps(value)
        return
    assert json.loads(dump(members)) == value


def test_member_of_another_kind_is_left_to_the_engine() -> None:
    members = parse(b'{"n":"two","stop":{"a":1},"deep":' + b"[" * 500 + b"]" * 500 + b"}")
    assert read(members, "n", int) is None
    assert read(members, "stop", str) is None
    assert read(members, "missing", str) is None
    assert read(members, "deep", int) is None


def test_one_megabyte_of_history_is_not_printed_again() -> None:
    history = json.dumps([{"role": "user", "content": "ä" * 500_000}]).encode()
    members = parse(b'{"messages":' + history + b"}")
    assert isinstance(members["messages"], msgspec.Raw)
    assert bytes(members["messages"]) == history

"""What is written into a store can be read again, and nothing else can."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metadata_store.record import Record, UnreadableRecord, decode, encode
from router.fingerprint import Fingerprint, Scope, fingerprint
from tests.unit.records import record

texts = st.text(st.characters(exclude_categories=["Cs"]))
records = st.builds(
    Record,
    worker=texts,
    generation=texts,
    params=st.binary(),
    fingerprint=st.builds(Fingerprint, tokens=st.integers(0, 2**40), chain=st.binary()),
    model=texts,
    stored_at=st.floats(allow_nan=False),
    deadline=st.floats(allow_nan=False),
    turn=st.integers(0, 2**40),
    prefill=texts,
)


@given(records)
def test_every_field_is_read_as_it_was_written(written: Record) -> None:
    assert decode(encode(written)) == written


@given(st.one_of(st.binary(), st.integers(0, 200).map(lambda cut: encode(record(9.0))[:cut])))
@example(b"\x91" * 3000)
@example(b"\x92\x01\x99\xa1\xff")
def test_bytes_that_are_no_entry_are_unreadable_and_no_other_error(data: bytes) -> None:
    if data == encode(record(9.0)):
        return
    with pytest.raises(UnreadableRecord):
        decode(data)


@given(st.integers(0, 250), st.integers(0, 255))
def test_entry_with_a_changed_byte_is_read_or_unreadable_and_no_other_error(place: int, value: int) -> None:
    data = bytearray(encode(record(9.0)))
    data[place % len(data)] = value
    try:
        found = decode(bytes(data))
    except UnreadableRecord:
        return
    assert isinstance(found, Record)


@pytest.mark.parametrize("version", [0, 1, 99])
def test_entry_of_another_version_is_unreadable(version: int) -> None:
    fields = msgspec.msgpack.decode(encode(record(9.0)))
    assert fields[0] == 2
    with pytest.raises(UnreadableRecord):
        decode(msgspec.msgpack.encode([version, *fields[1:]]))


def test_entry_of_24k_tokens_is_kilobytes_and_tells_no_token() -> None:
    tokens = list(range(70_000, 94_000))
    scope = Scope(secret=b"s" * 32, model="m", cache_salt="")
    written = encode(record(9.0, fingerprint=fingerprint(tokens, scope)))
    assert len(written) < 26_000
    assert all(token.to_bytes(4, "little") not in written for token in tokens)

"""A key names nothing and nobody, and no caller can name another's."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from metadata_store.keys import conversation_key, derive_secret

SECRET = derive_secret("secret")


def test_same_id_of_two_callers_or_models_is_two_conversations() -> None:
    callers = ["Bearer a", "Bearer b", "", None]
    keys = {
        conversation_key(SECRET, caller, model, "chat-1")
        for caller, model in itertools.product(callers, ["model-a", "model-b"])
    }
    assert len(keys) == 8


def test_key_is_the_same_on_every_replica_with_the_same_secret() -> None:
    assert conversation_key(derive_secret("x"), "a", "m", "1") == conversation_key(derive_secret("x"), "a", "m", "1")
    assert conversation_key(derive_secret("x"), "a", "m", "1") != conversation_key(derive_secret("y"), "a", "m", "1")


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_different_parts_give_different_keys(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (conversation_key(SECRET, *one) == conversation_key(SECRET, *other)) == (one == other)


def test_letters_moved_between_the_parts_give_another_key() -> None:
    keys = {
        conversation_key(SECRET, caller, model, id_)
        for caller, model, id_ in [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abcd", "", "")]
    }
    assert len(keys) == 4


def test_key_is_hex_and_of_one_length() -> None:
    for id_ in ["", "x", "x" * 256, "\N{SNOWMAN}"]:
        key = conversation_key(SECRET, None, "m", id_)
        assert len(bytes.fromhex(key)) == 16

"""The quick way with a chunk gives what the full reading gives."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.harvest import Harvest
from proxy.relay import cleaned
from proxy.sse import data_of
from proxy.usual_chunk import without_ids


def carried(event: bytes) -> Any:
    assert event.endswith(b"\n\n")
    return json.loads(data_of(event))


texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            '","token_ids":[1]', ',"token_ids":[7,8]', '\\","token_ids":[1],"', '"finish_reason":null', "token_ids",
            ',"kv_transfer_params":null', '"delta":{}', '"error"', "]", "[1", "data: [DONE]", "\\", '\\"',
        ]
    ),
)  # fmt: skip


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    delta = draw(st.dictionaries(st.sampled_from(["content", "reasoning", "role"]), texts, max_size=2))
    choice: dict[str, Any] = {"index": 0}
    if draw(st.booleans()):
        choice["delta"] = delta
    else:
        choice["text"] = draw(texts)
    choice["logprobs"] = draw(st.sampled_from([None, None, {"content": [{"token": draw(texts)}]}]))
    choice["finish_reason"] = draw(st.sampled_from([None, None, None, "stop"]))
    for name in ("token_ids", "prompt_token_ids"):
        told: Any = draw(st.sampled_from([..., None, [], "list"]))
        if told is not ...:
            choice[name] = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=3)) if told == "list" else told
    top: dict[str, Any] = {"id": draw(texts), "choices": [choice]}
    for name in ("prompt_token_ids", "kv_transfer_params"):
        if draw(st.integers(0, 4)) == 0:
            top[name] = draw(st.sampled_from([None, [1, 2], {"a": 1}]))
    order = draw(st.permutations(list(top)))
    spaced = draw(st.integers(0, 9)) == 0
    return json.dumps({name: top[name] for name in order}, separators=None if spaced else (",", ":")).encode()


def framed(chunk: bytes) -> bytes:
    return b"data: " + chunk + b"\n\n"


class Slow(Harvest):
    """The full reading alone."""

    def take_usual(self, event: bytes) -> bytes | None:
        """See ``Harvest``."""
        return None


@given(st.lists(chunks(), max_size=4))
def test_the_same_is_learned_and_shown(stream: list[bytes]) -> None:
    quick, slow = Harvest(client_wants_ids=False), Slow(client_wants_ids=False)
    for chunk in stream:
        shown, expected = cleaned(framed(chunk), quick), cleaned(framed(chunk), slow)
        assert (None if shown is None else carried(shown)) == (None if expected is None else carried(expected))
    for name in ("generated", "finished", "failed", "tokens", "params", "prompt_tokens"):
        told, expected_too = getattr(quick, name), getattr(slow, name)
        if isinstance(told, msgspec.Raw):
            told, expected_too = bytes(told), bytes(expected_too)
        assert told == expected_too, name


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[{"delta":{"content":"a"},"finish_reason":null,"token_ids":[7]}]}',
        b'{"choices":[{"text":"a","finish_reason":null,"prompt_token_ids":null,"token_ids":[7]}],"kv_transfer_params":null}',
    ],
)
def test_the_usual_chunks_of_engines_go_the_quick_way(chunk: bytes) -> None:
    quick = without_ids(framed(chunk))
    assert quick is not None
    assert quick[1] == [7]
    assert b"ids" not in quick[0]
    assert b"kv_transfer_params" not in quick[0]


def test_text_that_looks_like_a_member_stays_text() -> None:
    text = ',"token_ids":[1],"finish_reason":null'
    choice = {"delta": {"content": text}, "finish_reason": None, "token_ids": [5]}
    chunk = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    harvest = Harvest(client_wants_ids=False)
    shown = cleaned(framed(chunk), harvest)
    assert shown is not None
    assert carried(shown)["choices"][0]["delta"]["content"] == text
    assert harvest.generated == [5]

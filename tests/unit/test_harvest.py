"""What of decode's answer stays here, and that the rest goes on as it came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.harvest import Harvest

PARAMS = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_num_tokens": 5}


def chat_chunk(delta: dict[str, Any], *, finish: str | None = None, top: Any = None, **choice: Any) -> bytes:
    whole = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish} | choice
    return encoded({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [whole]} | (top or {}))


def text_chunk(text: str, *, finish: str | None = None, top: Any = None, **choice: Any) -> bytes:
    whole = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish} | choice
    return encoded({"id": "c", "object": "text_completion", "model": "m", "choices": [whole]} | (top or {}))


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


CHAT_STREAM = [
    chat_chunk({"role": "assistant", "content": ""}, top={"prompt_token_ids": [1, 2, 3]}),
    chat_chunk({"content": "a"}, token_ids=[10]),
    chat_chunk({}, token_ids=[11]),
    chat_chunk({"content": "b"}, token_ids=[12, 13]),
    chat_chunk({}, finish="stop", token_ids=[2], top={"kv_transfer_params": PARAMS}),
    encoded({"id": "c", "choices": [], "usage": {"prompt_tokens": 3}}),
]
TEXT_STREAM = [
    text_chunk("", prompt_token_ids=[1, 2, 3], token_ids=[10]),
    text_chunk("ab", token_ids=[11, 12, 13]),
    text_chunk("", finish="length", token_ids=[2], top={"kv_transfer_params": PARAMS}),
]
WHOLE_CHAT = [
    encoded(
        {
            "id": "c",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop",
                 "token_ids": [10, 11, 12, 13, 2]}
            ],
            "prompt_token_ids": [1, 2, 3],
            "kv_transfer_params": PARAMS,
            "usage": {"prompt_tokens": 3},
        }
    )
]  # fmt: skip
WHOLE_TEXT = [
    encoded(
        {
            "id": "c",
            "choices": [
                {"index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [10, 11, 12, 13, 2],
                 "prompt_token_ids": [1, 2, 3]}
            ],
            "kv_transfer_params": PARAMS,
        }
    )
]  # fmt: skip
ANSWERS = pytest.mark.parametrize(
    "answer", [CHAT_STREAM, TEXT_STREAM, WHOLE_CHAT, WHOLE_TEXT], ids=["chat", "text", "whole chat", "whole text"]
)


def taken(answer: list[bytes], *, wants: bool = False) -> tuple[Harvest, list[Any]]:
    harvest = Harvest(client_wants_ids=wants)
    seen = [harvest.take(part) for part in answer]
    return harvest, [json.loads(part) for part in seen if part is not None]


def without(value: Any, *names: str) -> Any:
    if isinstance(value, dict):
        return {name: without(inner, *names) for name, inner in value.items() if name not in names}
    return [without(inner, *names) for inner in value] if isinstance(value, list) else value


@ANSWERS
@pytest.mark.parametrize("wants", [False, True])
def test_everything_decode_told_is_learned(answer: list[bytes], wants: bool) -> None:
    harvest, _ = taken(answer, wants=wants)
    assert harvest.tokens == [1, 2, 3, 10, 11, 12, 13, 2]
    assert harvest.prompt_tokens == [1, 2, 3]
    assert harvest.params is not None
    assert json.loads(bytes(harvest.params)) == PARAMS
    assert harvest.finished in ("stop", "length")
    assert not harvest.failed


@ANSWERS
def test_client_that_asked_for_ids_gets_all_but_the_parameters(answer: list[bytes]) -> None:
    _, seen = taken(answer, wants=True)
    assert seen == [without(json.loads(part), "kv_transfer_params") for part in answer]


@ANSWERS
def test_client_that_did_not_ask_gets_no_ids_and_no_chunk_made_for_them(answer: list[bytes]) -> None:
    _, seen = taken(answer)
    expected = [
        without(json.loads(part), "kv_transfer_params", "token_ids", "prompt_token_ids")
        for part in answer
        if part != CHAT_STREAM[2]
    ]
    assert seen == expected


@pytest.mark.parametrize(
    "kept",
    [
        chat_chunk({}, finish="stop", token_ids=[2]),
        chat_chunk({}, token_ids=[2], logprobs={"content": []}),
        chat_chunk({"content": ""}, token_ids=[2]),
        chat_chunk({"reasoning": "r"}, token_ids=[2]),
        chat_chunk({"tool_calls": [{"index": 0}]}, token_ids=[2]),
        text_chunk("", token_ids=[2]),
    ],
)
def test_chunk_that_says_something_is_not_dropped(kept: bytes) -> None:
    _, seen = taken([kept])
    assert seen == [without(json.loads(kept), "token_ids")]


def test_null_parameters_on_every_chunk_neither_hide_the_real_ones_nor_reach_the_client() -> None:
    """vLLM 0.33 sends them so."""
    null = {"kv_transfer_params": None}
    answer = [
        chat_chunk({"role": "assistant", "content": ""}, top={"prompt_token_ids": [1]} | null),
        chat_chunk({"content": "a"}, token_ids=[10], top=null),
        chat_chunk({}, finish="stop", token_ids=[2], top={"kv_transfer_params": PARAMS}),
        encoded({"id": "c", "choices": [], "usage": {}} | null),
    ]
    harvest, seen = taken(answer)
    assert harvest.params is not None
    assert json.loads(bytes(harvest.params)) == PARAMS
    assert harvest.tokens == [1, 10, 2]
    assert "kv_transfer_params" not in json.dumps(seen)


def test_answer_that_was_not_retained_has_no_parameters() -> None:
    harvest, _ = taken([chat_chunk({}, finish="stop", token_ids=[2], top={"kv_transfer_params": None})])
    assert harvest.params is None


@pytest.mark.parametrize(
    "part",
    [
        chat_chunk({"content": "just text"}),
        text_chunk("just text"),
        encoded({"id": "c", "choices": [], "usage": {"prompt_tokens": 3}}),
        b"[DONE]",
        b"not JSON",
        b'{"choices":[{"finish_reason"',
        b"",
    ],
)
def test_part_without_anything_private_is_the_very_same_bytes(part: bytes) -> None:
    assert Harvest(client_wants_ids=False).take(part) is part


def test_text_that_mentions_private_names_is_left_alone() -> None:
    part = chat_chunk({"content": 'say "token_ids": [1] and kv_transfer_params: {} and "error"'}, token_ids=[5])
    harvest, seen = taken([part])
    assert seen == [without(json.loads(part), "token_ids")]
    assert harvest.generated == [5]
    assert harvest.params is None
    assert not harvest.failed


def test_unknown_members_keep_their_bytes_at_every_level() -> None:
    exact = b'"new":{"a" : 0.70, "b":12345678901234567890123, "c":"\\u00e4"}'
    part = (
        b'{"id":"c",' + exact + b',"choices":[{"index":0,' + exact + b',"delta":{"content":"x",' + exact + b"},"
        b'"token_ids":[5]}],"kv_transfer_params":{}}'
    )
    kept = Harvest(client_wants_ids=False).take(part)
    assert kept == part.replace(b',"token_ids":[5]', b"").replace(b',"kv_transfer_params":{}', b"")


@pytest.mark.parametrize(
    "silent",
    [
        chat_chunk({"content": "x"}),
        chat_chunk({"content": "x"}, token_ids=None),
        text_chunk("x", token_ids=None),
        chat_chunk({"content": "x"}, token_ids="no list"),
    ],
)
def test_tokens_after_a_chunk_that_did_not_tell_its_own_are_not_trusted(silent: bytes) -> None:
    """``include_reasoning: false`` makes the engine keep ids to itself."""
    for answer in ([CHAT_STREAM[0], silent, *CHAT_STREAM[1:]], [*CHAT_STREAM[:4], silent, *CHAT_STREAM[4:]]):
        harvest, _ = taken(answer)
        assert harvest.tokens is None
        assert harvest.prompt_tokens == [1, 2, 3]
        assert harvest.params is not None


def test_tokens_without_the_prompts_are_none() -> None:
    harvest, _ = taken(CHAT_STREAM[1:])
    assert (harvest.tokens, harvest.prompt_tokens) == (None, None)


@pytest.mark.parametrize("wrong", ["text", {"a": 1}, [1, "b"], [1.5]])
def test_prompt_ids_that_are_none_are_not_trusted(wrong: Any) -> None:
    first = chat_chunk({"role": "assistant", "content": ""}, top={"prompt_token_ids": wrong})
    harvest, _ = taken([first, *CHAT_STREAM[1:]])
    assert (harvest.tokens, harvest.prompt_tokens) == (None, None)


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}},
        {"object": "error", "error": {"message": "x"}, "kv_transfer_params": None},
    ],
)
def test_error_in_the_stream_is_noticed_and_passed_on(error: dict[str, Any]) -> None:
    harvest, seen = taken([*CHAT_STREAM[:3], encoded(error)])
    assert harvest.failed
    assert seen[-1] == without(error, "kv_transfer_params")


def test_error_that_is_null_is_none() -> None:
    harvest, _ = taken([encoded({"id": "c", "error": None, "choices": []})])
    assert not harvest.failed


@pytest.mark.parametrize(
    "odd",
    [
        b'{"token_ids":1}',
        b'["token_ids"]',
        b'{"choices":"token_ids"}',
        b'{"choices":[1],"x":"token_ids"}',
        b'{"choices":null,"x":"token_ids"}',
        b'{"choices":[{"delta":5,"token_ids":[1]}]}',
        b'{"choices":[{"finish_reason":5,"token_ids":[1]}]}',
    ],
)
def test_answer_of_an_odd_form_is_passed_on(odd: bytes) -> None:
    _, seen = taken([odd])
    assert len(seen) == 1

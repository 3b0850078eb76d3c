"""What each leg looks like, member by member."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from proxy.body import parse, raw
from proxy.dialects import DIALECTS, Dialect
from proxy.errors import ApiError
from proxy.token_ids import TokenIds
from router.kv_params import Members
from router.reuse import Reason

CHAT, COMPLETIONS = DIALECTS
MESSAGES = [{"role": "user", "content": "hello"}]
NEEDED: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": MESSAGES},
    "completions": {"model": "m", "prompt": "hello"},
}
PARAMS: Members = {"do_remote_decode": raw(True), "remote_block_ids": raw([[1, 2]])}
IDS = msgspec.Raw(b"[5,6,7]")

both = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


def request(dialect: Dialect, **members: Any) -> Any:
    return dialect.read(parse(json.dumps(NEEDED[dialect.name] | members).encode()), {})


def prefill(dialect: Dialect, ids: msgspec.Raw | None = None, **members: Any) -> Any:
    return json.loads(dialect.one_token_leg(request(dialect, **members), PARAMS, ids, tell_ids=ids is None))


def decode(dialect: Dialect, *, ids: msgspec.Raw | None = None, tell_ids: bool = False, **members: Any) -> Any:
    return json.loads(dialect.decode_leg(request(dialect, **members), PARAMS, ids, tell_ids=tell_ids))


AS_SENT = {"do_remote_decode": True, "remote_block_ids": [[1, 2]]}

DROPPED: list[tuple[str, Any]] = [
    ("stream_options", {"include_usage": True}),
    ("min_tokens", 5),
    ("n", 1),
    ("best_of", 1),
    ("logprobs", True),
    ("top_logprobs", 5),
    ("prompt_logprobs", 0),
    ("logprob_token_ids", [1]),
    ("return_tokens_as_token_ids", True),
    ("structured_outputs", {"choice": ["a"]}),
    ("guided_json", {}),
    ("guided_regex", "a"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "a"),
    ("kv_transfer_params", {"do_remote_prefill": True, "remote_block_ids": [[9]]}),
    ("conversation_id", "c"),
]

KEPT: list[tuple[str, Any]] = [
    ("temperature", 0.7),
    ("top_p", 0.9),
    ("top_k", 20),
    ("seed", 3),
    ("stop", ["x"]),
    ("stop_token_ids", [2]),
    ("logit_bias", {"5": -100}),
    ("ignore_eos", True),
    ("priority", 1),
    ("cache_salt", "salt"),
    ("user", "u"),
    ("metadata", {"conversation_id": "c"}),
    ("truncate_prompt_tokens", 50),
    ("add_special_tokens", False),
    ("some_future_member", {"a": [1, None]}),
]
IN_THE_PROMPT: list[tuple[str, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "none"),
    ("documents", [{"text": "d"}]),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("reasoning_effort", "high"),
    ("add_generation_prompt", False),
    ("continue_final_message", True),
]


@both
def test_prefill_computes_one_token_and_tells_the_prompts_ids(dialect: Dialect) -> None:
    expected = {
        **NEEDED[dialect.name],
        "max_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": AS_SENT,
    }
    assert prefill(dialect) == expected
    assert prefill(dialect, max_tokens=500, stream=True, return_token_ids=False) == expected


@both
@pytest.mark.parametrize(("name", "value"), DROPPED)
def test_member_does_not_reach_prefill(dialect: Dialect, name: str, value: Any) -> None:
    assert prefill(dialect, **{name: value}) == prefill(dialect)


@both
@pytest.mark.parametrize(("name", "value"), KEPT)
def test_member_reaches_prefill_as_it_is(dialect: Dialect, name: str, value: Any) -> None:
    assert prefill(dialect, **{name: value}) == prefill(dialect) | {name: value}


@pytest.mark.parametrize(("name", "value"), [*IN_THE_PROMPT, ("response_format", {"type": "json_object"})])
def test_what_a_chat_template_may_print_reaches_a_prefill_that_renders_itself(name: str, value: Any) -> None:
    """Else prefill computes another prompt than decode, and decode reads its blocks without looking."""
    assert prefill(CHAT, **{name: value}) == prefill(CHAT) | {name: value}


@both
def test_max_completion_tokens_is_one_where_the_client_sent_it(dialect: Dialect) -> None:
    assert prefill(dialect, max_completion_tokens=500)["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in prefill(dialect, max_tokens=500)


def test_prefill_of_a_chat_with_ids_gets_them_in_place_of_the_history() -> None:
    body = prefill(CHAT, ids=IDS, **dict(IN_THE_PROMPT), temperature=0.5, cache_salt="s")
    messages = body.pop("messages")
    assert body == {
        "model": "m",
        "temperature": 0.5,
        "cache_salt": "s",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": AS_SENT | {"prompt_token_ids": [5, 6, 7]},
    }
    assert "hello" not in json.dumps(messages)
    assert len(messages) == 1
    assert messages[0]["role"] == "user"


def test_prefill_of_a_completion_with_ids_gets_them_as_its_prompt() -> None:
    assert prefill(COMPLETIONS, ids=IDS, temperature=0.5) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "temperature": 0.5,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": AS_SENT,
    }


@both
def test_decode_gets_the_clients_own_request_and_where_to_read(dialect: Dialect) -> None:
    members = dict(
        [*DROPPED, *KEPT, *IN_THE_PROMPT], stream=True, max_tokens=9, max_completion_tokens=8, response_format={"a": 1}
    )
    expected = NEEDED[dialect.name] | members | {"kv_transfer_params": AS_SENT}
    del expected["conversation_id"]
    assert decode(dialect, **members) == expected
    assert decode(dialect, tell_ids=True, **members) == expected | {"return_token_ids": True}


@both
@pytest.mark.parametrize("asked", [True, False])
def test_decode_is_asked_for_ids_only_where_they_are_needed(dialect: Dialect, asked: bool) -> None:
    assert decode(dialect, return_token_ids=asked)["return_token_ids"] is asked
    assert decode(dialect, tell_ids=True, return_token_ids=asked)["return_token_ids"] is True
    assert "return_token_ids" not in decode(dialect)


def test_decode_with_ids_gets_them_where_its_api_looks_for_them() -> None:
    chat = decode(CHAT, ids=IDS)
    assert chat["messages"] == MESSAGES
    assert chat["kv_transfer_params"] == AS_SENT | {"prompt_token_ids": [5, 6, 7]}
    completion = decode(COMPLETIONS, ids=IDS)
    assert completion["prompt"] == [5, 6, 7]
    assert completion["kv_transfer_params"] == AS_SENT


@both
def test_worker_that_serves_alone_gets_the_clients_request_and_nothing_else(dialect: Dialect) -> None:
    sent = request(dialect, stream=True, n=2, kv_transfer_params={"remote_block_ids": [[9]]}, conversation_id="c")
    body = json.loads(dialect.decode_leg(sent, None, None, tell_ids=False))
    assert body == NEEDED[dialect.name] | {"stream": True, "n": 2}


@both
def test_numbers_and_unknown_members_keep_their_bytes_on_both_legs(dialect: Dialect) -> None:
    exact = b'"temperature":0.70,"new":{"a" : 12345678901234567890123, "b":"\\u00e4", "c":1e400}'
    data = json.dumps(NEEDED[dialect.name]).encode()[:-1] + b"," + exact + b"}"
    sent = dialect.read(parse(data), {})
    assert exact in dialect.one_token_leg(sent, PARAMS, None, tell_ids=True)
    assert exact in dialect.one_token_leg(sent, PARAMS, IDS, tell_ids=False)
    assert exact in dialect.decode_leg(sent, PARAMS, IDS, tell_ids=True)


@both
def test_clients_disguised_parameters_reach_no_engine(dialect: Dialect) -> None:
    data = json.dumps(NEEDED[dialect.name]).encode()[:-1] + b',"kv_transfer_p\\u0061rams":{"remote_host":"evil"}}'
    sent = dialect.read(parse(data), {})
    assert b"evil" not in dialect.one_token_leg(sent, PARAMS, None, tell_ids=True)
    assert b"evil" not in dialect.decode_leg(sent, PARAMS, None, tell_ids=False)
    assert b"evil" not in dialect.decode_leg(sent, None, None, tell_ids=False)


@pytest.mark.parametrize(("dialect", "missing"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_request_without_a_prompt_is_refused_by_name(dialect: Dialect, missing: str) -> None:
    with pytest.raises(ApiError) as raised:
        dialect.read(parse(b'{"model":"m"}'), {})
    assert (raised.value.status, raised.value.param) == (400, missing)


@both
def test_request_is_read_for_what_matters(dialect: Dialect) -> None:
    plain = request(dialect)
    assert (plain.model, plain.cache_salt, plain.wants_token_ids, plain.stops_on_text) == ("m", "", False, False)
    full = request(dialect, cache_salt="s", return_token_ids=True, stop="x")
    assert (full.cache_salt, full.wants_token_ids, full.stops_on_text) == ("s", True, True)
    assert not request(dialect, stop=[]).stops_on_text
    assert not request(dialect, stop=None).stops_on_text


@both
@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, None),
        ({"n": 1, "best_of": 1, "use_beam_search": False, "prompt_logprobs": None}, None),
        ({"n": 2}, Reason.SEVERAL_ANSWERS),
        ({"best_of": 3}, Reason.SEVERAL_ANSWERS),
        ({"use_beam_search": True}, Reason.SEVERAL_ANSWERS),
        ({"prompt_logprobs": 0}, Reason.PROMPT_LOGPROBS),
        ({"prompt_logprobs": 5}, Reason.PROMPT_LOGPROBS),
    ],
)
def test_what_one_worker_must_serve_alone(dialect: Dialect, members: dict[str, Any], reason: Reason | None) -> None:
    assert dialect.alone(request(dialect, **members)) is reason


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": [1, 2]}, None),
        ({"prompt": ["a", "b"]}, Reason.SEVERAL_PROMPTS),
        ({"prompt": [[1], [2]]}, Reason.SEVERAL_PROMPTS),
        ({"prompt": "a", "echo": True}, Reason.ECHO),
        ({"prompt": "a", "echo": False}, None),
    ],
)
def test_completions_that_one_worker_must_serve_alone(members: dict[str, Any], reason: Reason | None) -> None:
    assert COMPLETIONS.alone(request(COMPLETIONS, **members)) is reason


def _with_content(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (_with_content("text"), None),
        (_with_content(None), None),
        (_with_content([]), None),
        (_with_content([{"type": "text", "text": "a"}, "b", {"text": "c"}]), None),
        (_with_content([{"type": "image_url", "image_url": {"url": "data:"}}]), Reason.MEDIA),
        (_with_content([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]), Reason.MEDIA),
        (_with_content([{"type": "video_url"}]), Reason.MEDIA),
        (_with_content([{"image_url": "data:"}]), Reason.MEDIA),
        (_with_content([{"type": "some_future_part"}]), Reason.MEDIA),
        (_with_content([5]), Reason.MEDIA),
        ({"messages": "text"}, Reason.MEDIA),
        ({"echo": True}, Reason.ECHO),
    ],
)
def test_prompt_that_is_more_than_its_token_ids_is_never_reused(members: dict[str, Any], reason: Reason | None) -> None:
    assert CHAT.opaque(request(CHAT, **members)) is reason


@pytest.mark.parametrize(
    "part",
    [
        {"text": "a", "image_url": {"url": "data:"}},
        {"text": "a", "audio_url": {"url": "data:"}},
        {"text": "a", "image_embeds": None},
        {"type": "text", "text": "a", "uuid": "u", "image_url": {"url": "data:"}},
    ],
)
def test_part_that_is_text_and_media_at_once_is_never_reused(part: dict[str, Any]) -> None:
    """The engine looks for media in a part that has no type, or a uuid."""
    assert CHAT.opaque(request(CHAT, **_with_content([part]))) is Reason.MEDIA


def test_embedded_prompt_is_never_reused() -> None:
    assert COMPLETIONS.opaque(request(COMPLETIONS, prompt_embeds="x")) is Reason.MEDIA
    assert COMPLETIONS.opaque(request(COMPLETIONS)) is None


def test_ids_that_the_client_sent_need_no_render() -> None:
    assert COMPLETIONS.given_ids(request(COMPLETIONS, prompt=[1, 2, 3])) == [1, 2, 3]
    assert COMPLETIONS.given_ids(request(COMPLETIONS)) is None
    assert COMPLETIONS.given_ids(request(COMPLETIONS, prompt=[1, 2, 3], truncate_prompt_tokens=2)) is None
    assert CHAT.given_ids(request(CHAT)) is None


@pytest.mark.parametrize(
    "members",
    [{"tool_choice": "none"}, {"documents": []}, {"reasoning_effort": "low"}, {"response_format": {}}, {"new": 1},
     {"truncate_prompt_tokens": 5}],
)  # fmt: skip
def test_tokenize_is_not_asked_where_the_full_request_may_say_more(members: dict[str, Any]) -> None:
    assert CHAT.tokenize_body(request(CHAT, **members)) is None


def test_tokenize_is_told_what_it_knows_of() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = CHAT.tokenize_body(request(CHAT, tools=tools, tool_choice="auto", temperature=0.1, stream=True))
    assert body is not None
    assert json.loads(body) == NEEDED["chat"] | {"tools": tools}
    body = COMPLETIONS.tokenize_body(request(COMPLETIONS, max_tokens=5, add_special_tokens=False))
    assert body is not None
    assert json.loads(body) == NEEDED["completions"] | {"add_special_tokens": False}


def numbers(ids: TokenIds | None) -> list[int] | None:
    return None if ids is None else ids.numbers


def test_rendered_ids_of_media_are_not_used() -> None:
    assert numbers(CHAT.rendered_ids(b'{"token_ids":[1,2],"features":null,"model":"m"}')) == [1, 2]
    assert numbers(CHAT.rendered_ids(b'{"token_ids":[1,2]}')) == [1, 2]
    assert CHAT.rendered_ids(b'{"token_ids":[1,2],"features":{"mm_hashes":{}}}') is None


def test_rendered_ids_of_a_completion_are_those_of_its_one_prompt() -> None:
    assert numbers(COMPLETIONS.rendered_ids(b'[{"token_ids":[1,2]}]')) == [1, 2]
    assert COMPLETIONS.rendered_ids(b'[{"token_ids":[1]},{"token_ids":[2]}]') is None


@both
def test_answer_of_render_that_makes_no_sense_is_a_decode_error(dialect: Dialect) -> None:
    with pytest.raises(msgspec.DecodeError):
        dialect.rendered_ids(b'{"error":"x"}')

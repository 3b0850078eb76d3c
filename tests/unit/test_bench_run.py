"""What is sent to whom, in which order: a run against a server that is made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from pydantic import SecretStr

from bench.failure import BenchFailure
from bench.multiturn.client import Client, Model
from bench.multiturn.run import AS_IT_IS, Run
from bench.multiturn.settings import BenchSettings
from bench.multiturn.stream import Answer, Stream, TurnFailed
from bench.multiturn.talk import Made, Part, Recorded, Talk, Turn
from bench.multiturn.words import Measure

Json = dict[str, Any]

MEASURE = Measure(per_word=1.0, per_message=4.0, per_prompt=2.0)
MODEL = Model("m", vllm=True, max_length=4096)
ANSWER = Answer(
    message={"role": "assistant", "content": "?"},
    told=b"?",
    prompt_tokens=100,
    output_tokens=8,
    ttft=0.01,
    tpot=0.001,
    seconds=0.02,
    outcome="hit",
    reason="all_held",
    reused_tokens=90,
)


@dataclass
class Server:
    """Answers each arm with its own words, and notes what it was asked."""

    fails: tuple[str, int] | None = None
    """Arm and number of messages at which it does."""
    outcomes: Mapping[str, str | None] = field(default_factory=lambda: {"off": "off", "on": "hit"})
    url: str = "http://server.test"
    asked: list[tuple[str, Json, Mapping[str, str]]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    async def ask(self, body: Json, headers: Mapping[str, str]) -> Answer:
        arm = headers.get("X-Turnback-Reuse", AS_IT_IS)
        self.asked.append((arm, body | {"messages": list(body["messages"])}, headers))
        if self.fails == (arm, len(body["messages"])):
            raise TurnFailed("status 500: broken", 500)
        said = f"{arm} {len(body['messages'])}"
        message = {"role": "assistant", "content": said}
        return replace(ANSWER, message=message, told=b"same", outcome=self.outcomes.get(arm))

    async def delete(self, path: str) -> None:
        self.deleted.append(path)


def made(server: Server, **settings: Any) -> Run:
    chosen = BenchSettings(**{"admin_key": SecretStr("k"), **settings})
    return Run(cast(Client, server), MODEL, MEASURE, chosen)


def talk(turns: int, recorded: str | None = None) -> Talk:
    answer = Recorded({"role": "assistant", "content": recorded}) if recorded else None
    return Talk(
        tuple(
            Turn((Made("user", (Part(f"part {number}", 20),)),), 8, recorded_answer=answer) for number in range(turns)
        )
    )


async def test_both_arms_get_the_same_messages_with_the_answers_of_the_arm_with_reuse() -> None:
    server = Server()
    run = made(server)
    await run.main([talk(3)])
    assert [arm for arm, _, _ in server.asked] == ["off", "on"] * 3
    for first, second in zip(server.asked[::2], server.asked[1::2], strict=True):
        assert first[1]["messages"] == second[1]["messages"]
    said = [message["content"] for message in server.asked[-1][1]["messages"] if message["role"] == "assistant"]
    assert said == ["on 1", "on 3"]
    assert [turn.answer_digest for turn in run.turns] == [run.turns[0].answer_digest] * 6


async def test_who_is_first_changes_from_conversation_to_conversation() -> None:
    server = Server()
    await made(server).main([talk(2)] * 3)
    assert [arm for arm, _, _ in server.asked] == ["off", "on"] * 2 + ["on", "off"] * 2 + ["off", "on"] * 2
    server = Server()
    await made(server, contexts=[1000, 2000]).main([talk(1)] * 4)
    assert [arm for arm, _, _ in server.asked] == ["off", "on"] * 2 + ["on", "off"] * 2


async def test_each_arm_has_ids_and_a_salt_of_its_own() -> None:
    server = Server()
    await made(server, repeat=2).main([talk(2), talk(2)])
    ids = {(arm, headers["X-Conversation-Id"]) for arm, _, headers in server.asked}
    assert len(ids) == len({identity for _, identity in ids}) == 2 * 2 * 2
    salts = {(arm, body["cache_salt"]) for arm, body, _ in server.asked}
    assert len(salts) == len({salt for _, salt in salts}) == 2 * 2
    openings = {body["messages"][0]["content"] for _, body, _ in server.asked}
    # The two conversations say the same here; another repeat has other words.
    assert len(openings) == 2


async def test_what_only_vllm_knows_is_sent_to_nobody_else() -> None:
    server = Server()
    await made(server, vllm=False).main([talk(1)])
    assert not {"min_tokens", "cache_salt"} & set(server.asked[0][1])
    server = Server()
    await made(server).main([talk(1)])
    assert server.asked[0][1]["min_tokens"] == server.asked[0][1]["max_tokens"] == 8


async def test_a_turn_that_fails_ends_its_conversation_in_all_arms() -> None:
    server = Server(fails=("off", 3))
    run = made(server)
    await run.main([talk(3)])
    assert [(turn.arm, turn.turn, turn.error) for turn in run.turns] == [
        ("off", 1, None),
        ("on", 1, None),
        ("off", 2, "status 500: broken"),
        ("on", 2, None),
    ]


async def test_recorded_answers_go_into_the_history_if_wanted() -> None:
    server = Server()
    await made(server, workload="sharegpt", file="x", history="recorded").main([talk(2, recorded="so it was")])
    assert server.asked[-1][1]["messages"][1] == {"role": "assistant", "content": "so it was"}


async def test_without_a_key_there_is_one_arm_and_no_header() -> None:
    server = Server()
    run = made(server, admin_key=None)
    await run.main([talk(2)])
    assert [turn.arm for turn in run.turns] == [AS_IT_IS] * 2
    assert all(set(headers) == {"X-Conversation-Id"} for _, _, headers in server.asked)


async def test_past_the_ttl_the_last_conversations_go_on_after_waiting() -> None:
    server = Server()
    run = made(server, ttl=0.05, past_ttl=2, delete_ended=True)
    await run.main([talk(1), talk(1), talk(1)])
    past = [turn for turn in run.turns if turn.phase == "past_ttl"]
    assert [(turn.conversation, turn.turn) for turn in past] == [(1, 2), (1, 2), (2, 2), (2, 2)]
    assert all(turn.pause_seconds is not None and turn.pause_seconds >= 0.05 for turn in past)
    # The others were over before.
    assert len(server.deleted) == 2
    await run.forget_all()
    assert len(set(server.deleted)) == len(server.deleted) == 6


async def test_a_broken_conversation_does_not_go_on_past_the_ttl() -> None:
    run = made(Server(fails=("on", 1)), ttl=0.05, past_ttl=1)
    await run.main([talk(1)])
    assert [turn.phase for turn in run.turns] == ["main"] * 2


async def test_pauses_are_waited_for_scaled_and_capped() -> None:
    run = made(Server(), pause_scale=0.001, max_pause=0.05)
    first, second = talk(2).turns
    await run.main([Talk((first, replace(second, wait_seconds=20.0), replace(second, wait_seconds=9000.0)))])
    pauses = {turn.turn: turn.pause_seconds for turn in run.turns if turn.arm == "on"}
    assert pauses[1] is None
    assert (pauses[2] or 0) >= 0.02
    assert 0.05 <= (pauses[3] or 0) < 5


async def test_a_gap_counts_from_the_request_before() -> None:
    run = made(Server())
    first, second = talk(2).turns
    await run.main([Talk((first, replace(second, wait_seconds=0.05, wait_from="request")))])
    started = {(turn.arm, turn.turn): turn.started_seconds for turn in run.turns}
    assert started["on", 2] - started["off", 1] >= 0.05


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"off": None, "on": None}, "is no Turnback router"),
        ({"off": "first", "on": "first"}, "asked for reuse off and said 'first'"),
        ({"off": "off", "on": "off"}, "asked for reuse on and said 'off'"),
    ],
)
async def test_arms_that_are_none_are_told_before_anything_is_measured(
    outcomes: Mapping[str, str | None], said: str
) -> None:
    with pytest.raises(BenchFailure, match=said):
        await made(Server(outcomes=outcomes)).check()


def answer_of(*events: bytes) -> Answer:
    stream = Stream()
    for place, event in enumerate(events):
        stream.take(event, 10.0 + place)
    return stream.answer(9.0, 17.0, {"x-turnback-reuse": "hit", "x-turnback-reused-tokens": "64"})


def test_times_are_from_the_first_content_to_the_last() -> None:
    answer = answer_of(
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {"reasoning_content": "Hm."}}]}',
        b'{"choices": [{"delta": {"content": "A"}}]}',
        b'{"choices": [{"delta": {"content": "B"}, "finish_reason": "stop"}]}',
        b'{"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 3}}',
        b"[DONE]",
    )
    assert (answer.ttft, answer.tpot) == (2.0, 1.0)
    assert answer.message == {"role": "assistant", "content": "AB"}
    assert (answer.prompt_tokens, answer.output_tokens, answer.reused_tokens) == (70, 3, 64)


def test_tool_calls_are_put_together_and_compared_without_their_ids() -> None:
    def called(identity: bytes) -> Answer:
        return answer_of(
            b'{"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "' + identity + b'", "type": "function", '
            b'"function": {"name": "ls", "arguments": ""}}]}}]}',
            b'{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]}',
            b"[DONE]",
        )

    one, other = called(b"c1"), called(b"c2")
    assert one.message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    ]
    assert one.told == other.told
    assert one.message != other.message


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([b'{"choices": [{"delta": {"content": "A"}}]}'], "without its end mark"),
        ([b'{"error": {"message": "gone"}}'], "broke off.*gone"),
        ([b"nonsense"], "no chunk: nonsense"),
    ],
)
def test_a_stream_that_is_no_answer(events: list[bytes], said: str) -> None:
    with pytest.raises(TurnFailed, match=said):
        answer_of(*events)

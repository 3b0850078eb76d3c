"""Conversations from files in the public formats, written by hand, and drawn ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.failure import BenchFailure
from bench.multiturn.distribution import distribution
from bench.multiturn.history import History
from bench.multiturn.plan import SPARE, plan
from bench.multiturn.settings import BenchSettings
from bench.multiturn.talk import Made, Part, Recorded, Talk, Turn
from bench.multiturn.words import Measure
from bench.multiturn.workloads.bailian import bailian
from bench.multiturn.workloads.mooncake import mooncake
from bench.multiturn.workloads.sessions import sessions
from bench.multiturn.workloads.sharegpt import sharegpt
from bench.multiturn.workloads.synthetic import Shape, by_context, synthetic

NO_PAUSE = distribution("0")
MEASURE = Measure(per_word=1.0, per_message=4.0, per_prompt=2.0)
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file and tells where."""

    def write(content: str) -> Path:
        file = tmp_path / "given.jsonl"
        file.write_text(content)
        return file

    return write


def lengths(talk: Talk) -> list[tuple[int, int]]:
    """What is said and answered in each turn, in tokens."""
    return [
        (sum(said.tokens for said in turn.says if isinstance(said, Made)), turn.answer_tokens) for turn in talk.turns
    ]


def recorded(turn: Turn) -> list[object]:
    return [said.message for said in turn.says if isinstance(said, Recorded)]


# ShareGPT


def test_sharegpt(write: Write) -> None:
    file = write(
        """[
        {"id": "a", "conversations": [
            {"from": "gpt", "value": "Ask me."},
            {"from": "human", "value": "One?"}, {"from": "gpt", "value": "An answer of some letters"},
            {"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"},
            {"from": "human", "value": "nobody answers this"}]},
        {"id": "b", "conversations": [{"from": "system", "value": "Be short."}]},
        {"id": "c", "conversations": [
            {"from": "system", "value": "Be short."}, {"from": "user", "value": "A"}, {"from": "user", "value": "B"},
            {"from": "assistant", "value": "C"}]}]"""
    )
    first, other = sharegpt(file, NO_PAUSE, 0)
    assert [recorded(turn) for turn in first.turns] == [
        [{"role": "user", "content": "One?"}],
        [{"role": "user", "content": "Two?"}],
    ]
    assert [turn.answer_tokens for turn in first.turns] == [6, 1]
    assert first.turns[0].recorded_answer == Recorded({"role": "assistant", "content": "An answer of some letters"})
    assert recorded(other.turns[0]) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "A"},
        {"role": "user", "content": "B"},
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"conversations": []},\n{"conversations": [}]', r"given\.jsonl, line 2: not JSON"),
        ('[\n\n"\xff', r"given\.jsonl, line 3: not JSON"),
        ('{"conversations": []}', r"given\.jsonl: .*a list of"),
        ('[{"conversations": [{"from": "human"}]}]', r"given\.jsonl: .*`value`.*\$\[0\]"),
        ('[{"conversations": []}, {"conversations": [{"from": "elf", "value": "x"}]}]', r"entry 2: .*'elf'"),
    ],
)
def test_broken_sharegpt_names_the_place(write: Write, content: str, said: str) -> None:
    with pytest.raises(BenchFailure, match=said):
        sharegpt(write(content), NO_PAUSE, 0)


# Mooncake


def line(at: int, prompt: int, answer: int, *blocks: int) -> str:
    return f'{{"timestamp": {at}, "input_length": {prompt}, "output_length": {answer}, "hash_ids": {list(blocks)}}}\n'


def test_mooncake_finds_who_goes_on(write: Write) -> None:
    """Block 0 is a system prompt, which all have. The last block of a prompt is not full, so it gets another id."""
    file = write(
        line(0, 1100, 100, 0, 1, 2)
        + line(1000, 1300, 10, 0, 4, 5)
        + "\n"
        # 1 goes on: blocks 0 and 1 were full, the answer fits.
        + line(4000, 1500, 50, 0, 1, 6)
        # This one has the blocks, but not the room for the answer that came before.
        + line(5000, 1540, 10, 0, 1, 8, 13)
        + line(9000, 2100, 20, 0, 1, 14, 9, 10)
        + line(9500, 600, 5, 0, 11)
    )
    talks = list(mooncake(file, 2.0))
    assert [lengths(talk) for talk in talks] == [
        [(1100, 100), (300, 50), (550, 20)],
        [(1300, 10)],
        [(1540, 10)],
        [(600, 5)],
    ]
    assert [(turn.wait_seconds, turn.wait_from) for turn in talks[0].turns[1:]] == [(8.0, "request"), (10.0, "request")]
    assert [talk.arrival_seconds for talk in talks] == [0.0, 2.0, 10.0, 19.0]


def test_mooncake_a_shared_prompt_alone_makes_no_conversation(write: Write) -> None:
    """All fill block 0 only, and each is long enough for the answer before."""
    file = write("".join(line(1000 * number, 600 + 20 * number, 10, 0, 1 + number) for number in range(9)))
    assert len(list(mooncake(file, 1.0))) == 9


def test_mooncake_of_two_that_go_on_from_one_the_second_is_its_own(write: Write) -> None:
    file = write(line(0, 1030, 10, 0, 1, 2) + line(1, 1200, 10, 0, 1, 3) + line(2, 1300, 10, 0, 1, 3))
    assert [len(talk.turns) for talk in mooncake(file, 1.0)] == [3]
    file = write(line(0, 1030, 10, 0, 1, 2) + line(1, 1600, 10, 0, 1, 3, 4) + line(2, 1500, 10, 0, 1, 5))
    assert [len(talk.turns) for talk in mooncake(file, 1.0)] == [2, 1]


def test_equal_blocks_are_equal_text(write: Write) -> None:
    (first,) = mooncake(write(line(0, 1100, 1, 0, 1, 2)), 1.0)
    (second,) = mooncake(write(line(0, 1400, 1, 0, 1, 7)), 1.0)
    texts = [MEASURE.said(talk.turns[0].says[0], opens=True)["content"].split() for talk in (first, second)]
    assert [len(text) for text in texts] == [1100 - 6, 1400 - 6]
    assert texts[0][:1024] == texts[1][:1024]
    assert texts[0][1024:1060] != texts[1][1024:1060]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (line(0, 1, 1) + '{"timestamp": 0', r"given\.jsonl, line 2"),
        (line(0, 1, 1) + line(0, -1, 1), r"given\.jsonl, line 2: .*input_length"),
        (line(0, 1, 1) + '{"timestamp": 0, "input_length": 5, "output_length": 5}', r"line 2: .*hash_ids"),
        (line(0, 1, 1) + "\n[]", r"given\.jsonl, line 3"),
    ],
)
def test_broken_mooncake_names_file_and_line(write: Write, content: str, said: str) -> None:
    with pytest.raises(BenchFailure, match=said):
        list(mooncake(write(content), 1.0))


# Bailian


def chat(chat_id: int, parent: int, at: float, prompt: int, answer: int, *blocks: int, turn: int = 1) -> str:
    return (
        f'{{"chat_id": {chat_id}, "parent_chat_id": {parent}, "timestamp": {at}, "input_length": {prompt}, '
        f'"output_length": {answer}, "type": "text", "turn": {turn}, "hash_ids": {list(blocks)}}}\n'
    )


def test_bailian_parents_tell_the_conversations(write: Write) -> None:
    file = write(
        chat(1, -1, 0.5, 40, 10, 1, 2, 3)
        + chat(2, -1, 1.0, 20, 5, 4, 5)
        # The history was shortened: something is said all the same.
        + chat(4, 3, 31.5, 60, 5, 1, 2, 3, 8, turn=3)
        + chat(3, 1, 11.5, 70, 20, 1, 2, 3, 6, 7, turn=2)
        # Its parent is not in the file; and a second one with a parent that has gone on.
        + chat(6, 99, 40.0, 33, 1, 1, 2, 9, turn=2)
        + chat(7, 1, 50.0, 90, 1, 1, 2, 3, 10, 11, 12, turn=2)
    )
    talks = list(bailian(file, 1.0))
    assert [lengths(talk) for talk in talks] == [[(40, 10), (20, 20), (1, 5)], [(20, 5)], [(33, 1)], [(90, 1)]]
    assert [turn.wait_seconds for turn in talks[0].turns] == [0.0, 11.0, 20.0]
    opening = talks[0].turns[0].says[0]
    assert isinstance(opening, Made)
    assert opening.parts == (Part("block 1", 16), Part("block 2", 16), Part("block 3", 8))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (chat(1, -1, 0, 1, 1) + chat(1, -1, 1, 1, 1), r"given\.jsonl, line 2: chat_id 1"),
        ('{"chat_id": "x"}', r"given\.jsonl, line 1: .*chat_id"),
        (chat(1, -1, 0, 1, 1) + "{", r"given\.jsonl, line 2"),
    ],
)
def test_broken_bailian_names_file_and_line(write: Write, content: str, said: str) -> None:
    with pytest.raises(BenchFailure, match=said):
        list(bailian(write(content), 1.0))


# Sessions

CALL = '{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}'
SESSION = [
    '{"role": "system", "content": "You have tools."}',
    '{"role": "user", "content": "What is here?"}',
    f'{{"role": "assistant", "content": null, "tool_calls": [{CALL}]}}',
    '{"role": "tool", "tool_call_id": "c1", "content": "a.txt"}',
    '{"role": "assistant", "content": "One file."}',
]


def test_sessions_of_one_message_a_line_and_of_one_session_a_line(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("\n".join(SESSION))
    whole = f'{{"messages": [{", ".join(SESSION[1:3])}], "tools": [{{"type": "function"}}]}}\n'
    (tmp_path / "a.jsonl").write_text(whole + '{"messages": []}\n')
    (tmp_path / "notes.txt").write_text("not one of them")
    one, two = sessions(tmp_path, NO_PAUSE, 0)
    assert (len(one.turns), one.tools) == (1, ({"type": "function"},))
    assert [len(turn.says) for turn in two.turns] == [2, 1]
    assert recorded(two.turns[1]) == [{"role": "tool", "tool_call_id": "c1", "content": "a.txt"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (SESSION[0] + "\n{", r"s\.jsonl, line 2"),
        (SESSION[0] + '\n{"role": "elf", "content": ""}', r"s\.jsonl, line 2: .*'elf'"),
        (SESSION[0] + '\n{"role": "user", "content": 7}', r"s\.jsonl, line 2: .*content"),
        ('{"messages": [{"role": "user", "content": "x"}, {}]}', r"s\.jsonl, line 1: .*role"),
        ('{"messages": 3}', r"s\.jsonl, line 1: .*messages"),
        (SESSION[0] + '\n{"messages": []}', r"s\.jsonl: some lines"),
    ],
)
def test_broken_session_names_file_and_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "s.jsonl").write_text(content)
    with pytest.raises(BenchFailure, match=said):
        sessions(tmp_path, NO_PAUSE, 0)


def test_no_session_and_no_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchFailure, match="no folder with"):
        sessions(tmp_path, NO_PAUSE, 0)
    for read in (mooncake, bailian):
        with pytest.raises(BenchFailure, match=r"cannot read .*none\.jsonl"):
            list(read(tmp_path / "none.jsonl", 1.0))
    with pytest.raises(BenchFailure, match=r"cannot read .*none\.json"):
        sharegpt(tmp_path / "none.json", NO_PAUSE, 0)


def test_a_tools_output_answers_a_call_of_this_run(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("\n".join(SESSION))
    first, second = sessions(tmp_path, NO_PAUSE, 0)[0].turns
    called, silent = History(MEASURE, ""), History(MEASURE, "")
    for history in (called, silent):
        history.say(first)
    called.answered({"role": "assistant", "content": "", "tool_calls": [{"id": "new"}]})
    silent.answered({"role": "assistant", "content": "No."})
    for history in (called, silent):
        history.say(second)
    assert called.messages[-1] == {"role": "tool", "tool_call_id": "new", "content": "a.txt"}
    assert silent.messages[-1] == {"role": "user", "content": "a.txt"}


# Synthetic

SHAPE = Shape(
    turns=distribution("2..4"),
    system=distribution("200"),
    tool=distribution("lognormal:100:0.5"),
    answer=distribution("10..20"),
    pause=distribution("exp:3"),
)


def test_synthetic_is_the_same_for_the_same_seed() -> None:
    assert synthetic(SHAPE, 5, 1) == synthetic(SHAPE, 5, 1) != synthetic(SHAPE, 5, 2)
    assert synthetic(SHAPE, 5, 1)[:3] == synthetic(SHAPE, 3, 1)
    for talk in synthetic(SHAPE, 20, 1):
        assert 2 <= len(talk.turns) <= 4
        assert all(10 <= turn.answer_tokens <= 20 for turn in talk.turns)
        assert [len(turn.says) for turn in talk.turns] == [2] + [1] * (len(talk.turns) - 1)
        assert talk.turns[0].wait_seconds == 0 < talk.turns[1].wait_seconds


def test_contexts_are_those_of_second_prompts() -> None:
    talks = by_context(SHAPE, (1000, 4000), 3, 0)
    assert [talk.context for talk in talks] == [1000, 4000] * 3
    for talk in talks:
        (opening, answer), (tool, _), *_ = lengths(talk)
        assert opening + answer + tool == talk.context
    with pytest.raises(ValueError, match="30 tokens are too few"):
        by_context(SHAPE, (30,), 1, 0)


@pytest.mark.parametrize(
    ("text", "least", "most", "mean"),
    [("7", 7, 7, 7), ("2..4", 2, 4, 3), ("exp:5", 0, 1000, 5), ("lognormal:8:0", 8, 8, 8), ("exp:0", 0, 0, 0)],
)
def test_distributions(text: str, least: float, most: float, mean: float) -> None:
    draw = random.Random(3)
    values = [distribution(text).draw(draw) for _ in range(4000)]
    assert least - 1e-9 <= min(values) <= max(values) <= most + 1e-9
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("text", ["", "x", "4..2", "1..2..3", "exp:", "exp:1:2", "lognormal:3", "-1", "nan", "inf"])
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        distribution(text)


# Text and planning


def test_text_has_the_wanted_length_whatever_a_word_is() -> None:
    message = Made("user", tuple(Part(f"block {number}", 16) for number in range(50)))
    for per_word in (0.8, 1.0, 1.3, 4.0):
        measure = Measure(per_word, per_message=5.0, per_prompt=3.0)
        text = measure.said(message, opens=True)["content"]
        assert len(text.split()) * per_word == pytest.approx(800 - 8, abs=per_word)


def test_conversations_are_cut_to_what_fits_and_chosen(write: Write) -> None:
    file = write(
        chat(1, -1, 5.0, 100, 10)
        + chat(2, 1, 6.0, 200, 10)
        + chat(3, 2, 7.0, 2000, 10)
        + chat(4, -1, 5.5, 50, 5)
        + chat(5, -1, 9.0, 60, 900)
        + chat(6, 5, 19.0, 1000, 5)
        + chat(7, -1, 9.5, 60, 5)
        + chat(8, 7, 9.75, 80, 5)
    )
    settings = BenchSettings(workload="bailian", file=file, conversations=2, max_answer=40)
    found = plan(settings, MEASURE, limit=240 + SPARE)
    assert [lengths(talk) for talk in found.talks] == [[(100, 10), (90, 10)], [(60, 40), (40, 5)]]
    assert found.passed_over == 1
    assert [talk.arrival_seconds for talk in found.talks] == [0.0, 4.0]
    with pytest.raises(BenchFailure, match="no conversation has 2 turns or more within 20 tokens"):
        plan(settings, MEASURE, limit=20)
    with pytest.raises(BenchFailure, match="contexts: 5000 tokens do not fit into 4096"):
        plan(BenchSettings(contexts=[1000, 5000]), MEASURE, limit=4096)

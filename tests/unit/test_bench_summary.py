"""What turns come to, on numbers worked by hand; and how that is shown."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from pydantic import SecretStr
from rich.console import Console

from bench.multiturn.command import problems_of
from bench.multiturn.report import page
from bench.multiturn.settings import BenchSettings, WrongSettings, load, shown
from bench.multiturn.summary import Spread, Summary, busy_seconds, spread, summarised
from bench.multiturn.table import percentiles, tables
from bench.multiturn.watch import look_at
from bench.result import Phase, Result, Retained, TurnResult


def turn(
    arm: str,
    number: int,
    prompt: int | None,
    ttft: float,
    *,
    conversation: int = 0,
    output: int = 10,
    reused: int = 0,
    outcome: str | None = "off",
    answer: str | None = "same",
    started: float = 0.0,
    seconds: float = 1.0,
    phase: Phase = "main",
    error: str | None = None,
) -> TurnResult:
    return TurnResult(
        arm=arm,
        conversation=conversation,
        turn=number,
        phase=phase,
        prompt_tokens=prompt,
        output_tokens=output,
        reused_tokens=reused,
        outcome=outcome,
        ttft_seconds=ttft,
        turn_seconds=seconds,
        started_seconds=started,
        answer_digest=answer,
        error=error,
    )


TURNS = [
    turn("off", 1, 900, 0.5, phase="warmup"),
    turn("off", 1, 1000, 0.10, started=0.0),
    turn("on", 1, 1000, 0.11, outcome="first", started=1.0),
    turn("off", 2, 1500, 0.20, started=3.0),
    turn("on", 2, 1500, 0.05, outcome="hit", reused=1009, started=2.0),
    turn("off", 3, 3000, 0.40, started=4.0),
    turn("on", 3, 3000, 0.10, outcome="partial", reused=1200, answer="other", started=5.0),
    turn("off", 2, 1400, 0.30, conversation=1, started=4.5, seconds=2.0),
    turn("on", 2, 1400, 0.15, conversation=1, outcome="expired", started=6.0),
    turn("off", 3, None, 0.0, conversation=1, error="status 500", outcome=None, answer=None),
    turn("off", 4, 3100, 0.4, phase="past_ttl"),
    turn("on", 4, 3100, 0.4, phase="past_ttl", outcome="expired"),
]
RETAINED = [
    Retained(at_seconds=1.0, worker="http://d1:1", entries=1, tokens=1000, share=0.1),
    Retained(at_seconds=1.0, worker="http://d2:1", entries=1, tokens=300, share=0.3),
    Retained(at_seconds=2.0, worker="http://d1:1", entries=1, tokens=1200, share=0.12),
]
ARMS = ["off", "on"]


@pytest.fixture
def summary() -> Summary:
    """Of the turns above."""
    return summarised(TURNS, ARMS, RETAINED, {"reused": 2209, "new": 1000})


def test_spread() -> None:
    assert spread([]) is None
    assert spread([0.3]) == Spread(1, 0.3, 0.3, 0.3)
    found = spread([float(number) for number in range(101)])
    assert found is not None
    assert (found.count, found.p50, found.p95, found.p99) == pytest.approx((101, 50, 95, 99))
    two = spread([1.0, 3.0])
    assert two is not None
    assert (two.p50, two.p95) == pytest.approx((2.0, 2.9))


def test_an_arms_figures(summary: Summary) -> None:
    off, on = summary.arms
    assert (off.turns, off.errors, on.turns, on.errors) == (5, 1, 4, 0)
    assert off.later_ttft is not None
    assert off.later_ttft.p50 == pytest.approx(0.30)
    assert (off.prompt_tokens, off.output_tokens, off.reused_tokens) == (6900, 40, 0)
    # Turn 2 has 1,000 + 10 from before, turn 3 has 1,500 + 10; the other conversation's turn 1 was not seen.
    assert off.computed_again_tokens == 1010 + 1510
    assert on.computed_again_tokens == 1 + 310
    assert off.hit_rate == 0.0
    assert on.hit_rate == pytest.approx(2 / 3)
    assert on.outcomes == {"first": 1, "hit": 1, "partial": 1, "expired": 1}


def test_throughput_is_that_of_the_time_in_which_the_arm_ran(summary: Summary) -> None:
    # From 0 to 1, from 3 to 6.5: at 4.5 a second one began before the first had ended.
    assert summary.arms[0].busy_seconds == pytest.approx(4.5)
    assert summary.arms[0].output_tokens_per_second == pytest.approx(40 / 4.5)
    assert busy_seconds([]) == 0


def test_by_context_only_later_turns_count(summary: Summary) -> None:
    middle, long = summary.contexts
    assert (middle.context, middle.prompt_tokens, long.context) == ("1k-2k", 1450, "2k-4k")
    assert middle.ttft["off"].p50 == pytest.approx(0.25)
    assert middle.ttft["on"].p50 == pytest.approx(0.10)
    assert middle.ratio == pytest.approx(2.5)
    assert (middle.compared, middle.equal) == (2, 2)
    assert (long.compared, long.equal) == (1, 0)


def test_by_the_contexts_that_were_asked_for() -> None:
    found = summarised(TURNS, ARMS, contexts=(1500, 3000)).contexts
    assert [(row.context, row.ttft["off"].count) for row in found] == [("1,500", 2), ("3,000", 1)]


def test_by_turn_and_answers(summary: Summary) -> None:
    assert [(row.turn, row.ttft["on"].count, row.outcomes["on"]) for row in summary.turns] == [
        (1, 1, {"first": 1}),
        (2, 2, {"hit": 1, "expired": 1}),
        (3, 1, {"partial": 1}),
    ]
    assert (summary.compared, summary.equal) == (4, 3)
    assert (summary.peak_retained_tokens, summary.peak_retained_share) == (1300, 0.3)


def test_past_the_ttl(summary: Summary) -> None:
    assert summary.past_ttl is not None
    assert (summary.past_ttl.turns, summary.past_ttl.reused, summary.past_ttl.equal) == (2, 0, 1)
    assert summary.past_ttl.outcomes == {"expired": 1}
    assert [(row.context, row.ratio) for row in summary.past_ttl.contexts] == [("2k-4k", 1.0)]


def test_what_fails_a_run(summary: Summary) -> None:
    quiet = BenchSettings()
    strict = BenchSettings(require_equal=True, past_ttl=1, ttl=1)
    assert problems_of(quiet, summary) == ["1 turns got no complete answer; their conversations ended there"]
    assert "1 answers with reuse differ from those without" in problems_of(strict, summary)
    wrong = summarised([turn("on", 2, 900, 0.1, phase="past_ttl", outcome="hit")], ARMS)
    assert problems_of(quiet, wrong) == ["1 turns past the TTL reused blocks that decode need not have any more"]
    assert problems_of(strict, summarised([], ARMS)) == ["no conversation was left to go on past the TTL"]
    assert problems_of(quiet, summarised([], ARMS)) == []


def test_the_table_has_both_arms(summary: Summary) -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(tables(summary))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "reuse off",
        "reuse on",
        "67%",
        "2.50",
        "2 of 2",
        "Answers equal with and without reuse: 3 of 4",
        "-",
    ):
        assert words in said
    assert "Past the TTL: 2 of 2 turns fell back (expired 1), answers equal: 1 of 1." in said
    assert "1 turns came when the TTL was over" in said
    assert "1,300 tokens, 30% of a worker's KV cache" in said


def test_times_are_in_the_unit_that_is_read() -> None:
    assert percentiles(Spread(1, 0.0123, 0.2, 1.5)) == "12.3 / 200 / 1,500 ms"
    assert percentiles(Spread(1, 12.34, 20, 31)) == "12.3 / 20.0 / 31.0 s"
    assert percentiles(None) == "-"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.points_to: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.points_to += [
            value or ""
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "srcset", "data", "action")
        ]


def result(summary: Summary, settings: BenchSettings) -> Result:
    return Result(
        created="2026-01-01T00:00:00+00:00",
        settings=shown(settings),
        arms=ARMS,
        workload={"model": "<b>m</b>", "conversations": 2},
        turns=TURNS,
        retained=RETAINED,
        summary=msgspec.to_builtins(summary),
    )


def test_the_page_needs_nothing_else_and_tells_no_key(summary: Summary) -> None:
    settings = BenchSettings(
        url="http://router.test:8000", admin_key=SecretStr("hush-admin"), api_key=SecretStr("hush-api")
    )
    made = result(summary, settings)
    text = page(made, summary, ["1 turns got no complete answer"])
    parsed = _Page()
    parsed.feed(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert all(target.startswith("#") for target in parsed.points_to)
    # The only addresses are those of what was measured.
    assert set(re.findall(r"https?://[^\s<\"&]+", text)) == {"http://router.test:8000", "http://d1:1", "http://d2:1"}
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)", text)) <= set(re.findall(r"url\((#[^)]*)", text))
    assert parsed.tags.count("svg") == 4
    assert "currentColor" in text
    assert "status 500" in text
    assert "&lt;b&gt;m&lt;/b&gt;" in text
    for said in (text, str(made)):
        assert "hush" not in said


def test_a_page_of_nothing() -> None:
    nothing = summarised([], ["as it is"])
    made = Result(created="", settings={}, arms=["as it is"], workload={}, turns=[])
    assert "<svg" not in page(made, nothing, [])


def test_what_a_router_says_of_itself() -> None:
    look = look_at(
        "# HELP turnback_prompt_tokens_total x\n# TYPE turnback_prompt_tokens_total counter\n"
        'turnback_prompt_tokens_total{fate="reused"} 100.0\nturnback_prompt_tokens_total{fate="new"} 7.0\n'
        "# TYPE turnback_retained_tokens gauge\n"
        'turnback_retained_tokens{worker="http://d:1"} 512.0\nturnback_retained_share{worker="http://d:1"} 0.25\n'
        'turnback_worker_kv_capacity_tokens{role="decode",worker="http://d:1"} 2048.0\n'
        'turnback_worker_kv_capacity_tokens{role="prefill",worker="http://p:1"} 4096.0\n'
        'other_metric{worker="http://d:1"} 1.0\n',
        3.0,
    )
    assert look.prompt_tokens == {"reused": 100.0, "new": 7.0}
    assert look.retained == (Retained(at_seconds=3.0, worker="http://d:1", tokens=512, share=0.25),)
    assert look.capacity == {"http://d:1": 2048}
    assert look_at("go_threads 7\n", 0.0).retained == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "mooncake"], "file: mooncake needs one"),
        (["--file", "x"], "file: workload is synthetic"),
        (["--turns", "5..2"], "turns: .*lower bound"),
        (["--pause", "often"], "pause: 'often' is none of"),
        (["--url", "localhost:8000"], "url: .*is not like"),
        (["--url", "http://a:b@h:1"], "url: .*api_key"),
        (["--output", "no-such-folder/x"], "output: there is no folder no-such-folder"),
        (["--output", "."], "output: . names no file"),
        (["--contexts", "0"], "contexts: lengths"),
        (["--contexts", "many"], r"contexts.*integer"),
        (["--workload", "sessions", "--file", "x", "--contexts", "1000"], "contexts: only for"),
        (["--past-ttl", "2"], "past_ttl: needs ttl"),
        (["--history", "recorded"], "history: answers are not recorded"),
        (["--concurrency", "0"], "concurrency: "),
    ],
)
def test_wrong_settings_name_the_setting(arguments: list[str], said: str) -> None:
    with pytest.raises(WrongSettings, match=said):
        load(arguments)


@pytest.mark.parametrize("url", ["http://user:hush@h:1", "user:hush@h:1", "http://user:hush@h:1/?x"])
def test_a_credential_in_the_url_is_not_repeated(url: str) -> None:
    with pytest.raises(WrongSettings) as raised:
        load(["--url", url])
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("told", "name"), [("x", "x"), ("x.json", "x"), ("x.html", "x"), ("x.json.json", "x.json"), ("run.1", "run.1")]
)
def test_results_may_be_named_with_an_ending(told: str, name: str) -> None:
    assert load(["--output", told]).output == Path(name)


def test_settings_from_the_environment_and_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNBACK_BENCH_ADMIN_KEY", "k")
    monkeypatch.setenv("TURNBACK_BENCH_CONTEXTS", "1000,2000")
    monkeypatch.setenv("TURNBACK_BENCH_API_KEY", "")
    settings = load(["--url", "http://h:1/v1/", "--seed", "7"])
    assert (settings.url, settings.seed, settings.contexts) == ("http://h:1", 7, [1000, 2000])
    assert settings.compares
    assert settings.api_key is None
    assert load(["--contexts", "300", "400"]).contexts == [300, 400]

"""`turnback bench` as a user runs it, against a router in front of simulated engines."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.result import Result, load
from proxy.cli import main
from tests.contract.conftest import House, MakeHouse
from tests.running import eventually

KEY = "of the admin"
WAIT = 120.0


@dataclass(frozen=True)
class Ran:
    """What became of the command."""

    code: int
    out: str
    err: str
    output: Path

    @property
    def result(self) -> Result:
        return load(self.output.with_name(f"{self.output.name}.json"))

    @property
    def page(self) -> str:
        return self.output.with_name(f"{self.output.name}.html").read_text()


@dataclass(frozen=True)
class Bench:
    """Runs the command in a thread of this process: importing what plots takes longer than most runs."""

    output: Path
    capture: pytest.CaptureFixture[str]

    async def __call__(self, url: str, *arguments: str) -> Ran:
        code = await asyncio.to_thread(main, ["bench", "--url", url, "--output", str(self.output), *arguments])
        said = self.capture.readouterr()
        return Ran(code, said.out, said.err, self.output)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """The command, in-process."""
    return Bench(tmp_path / "result", capsys)


async def as_a_process(url: str, output: Path, *arguments: str, **variables: str) -> Ran:
    command = [sys.executable, "-m", "proxy.cli", "bench", "--url", url, "--output", str(output), *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ran(process.returncode or 0, out.decode(), err.decode(), output)


async def nothing_retained(house: House) -> bool:
    return await house.proxy.metric("turnback_retained_tokens") == 0


async def test_with_and_without_reuse_and_past_the_ttl(make_house: MakeHouse, tmp_path: Path) -> None:
    ttl = 6.0
    async with make_house(
        decode={"decoder_kv_blocks_ttl": ttl},
        admin_key=KEY,
        decoder_kv_blocks_ttl=ttl,
        decoder_kv_blocks_margin=0.5,
        retained_watch_interval=0.1,
    ) as house:
        ran = await as_a_process(
            house.proxy.url,
            tmp_path / "ab",
            *("--conversations", "3", "--turns", "3", "--concurrency", "2", "--warm-up", "1"),
            *("--system-tokens", "200", "--tool-tokens", "50..100", "--answer-tokens", "8"),
            *("--ttl", str(ttl), "--past-ttl", "2", "--require-equal", "--poll", "0.1"),
            TURNBACK_BENCH_ADMIN_KEY=KEY,
        )
        assert (ran.code, ran.err.count("turnback:")) == (0, 0), ran.out + ran.err
        result = ran.result
        counted = [turn for turn in result.turns if turn.phase == "main"]
        assert {(turn.arm, turn.conversation, turn.turn) for turn in counted} == {
            (arm, conversation, turn) for arm in ("off", "on") for conversation in range(3) for turn in (1, 2, 3)
        }
        assert all(turn.error is None for turn in result.turns)
        assert {turn.outcome for turn in result.turns if turn.arm == "off"} == {"off"}
        assert {turn.outcome for turn in counted if turn.arm == "on" and turn.turn == 1} == {"first"}
        assert all(turn.reused for turn in counted if turn.arm == "on" and turn.turn > 1)
        assert {turn.outcome for turn in result.turns if turn.phase == "past_ttl" and turn.arm == "on"} == {"expired"}
        on = result.summary["arms"][1]
        assert (on["arm"], on["hit_rate"]) == ("on", 1.0)
        assert on["computed_again_tokens"] < result.summary["arms"][0]["computed_again_tokens"]
        assert (result.summary["compared"], result.summary["equal"]) == (9, 9)
        assert result.summary["past_ttl"]["equal"] == result.summary["past_ttl"]["compared"] == 2
        assert max(look.tokens or 0 for look in result.retained) > 200
        assert "Answers equal with and without reuse: 9 of 9." in ran.out
        assert re.search(r"Waiting [56] s until the TTL is over", ran.err)
        assert KEY not in ran.out + ran.err + ran.page + (tmp_path / "ab.json").read_text()
        # It leaves nothing behind, though no deadline has come.
        await eventually(lambda: nothing_retained(house))


async def test_a_turn_that_reuses_past_the_ttl_fails_the_run(make_house: MakeHouse, bench: Bench) -> None:
    """The router was told a longer time than the bench: so it is not over yet."""
    async with make_house(admin_key=KEY) as house:
        ran = await bench(
            house.proxy.url,
            *("--conversations", "1", "--turns", "2", "--warm-up", "0", "--answer-tokens", "8"),
            *("--ttl", "0.1", "--past-ttl", "1"),
            *("--admin-key", KEY),
        )
    assert ran.code == 1
    assert "1 turns past the TTL reused blocks" in ran.err
    assert "1 turns past the TTL reused blocks" in ran.page


async def test_without_a_key_one_arm_is_served_as_it_is(make_house: MakeHouse, bench: Bench) -> None:
    async with make_house() as house:
        ran = await bench(house.proxy.url, "--conversations", "2", "--turns", "2")
    assert ran.code == 0, ran.err
    assert ran.result.arms == ["as it is"]
    assert ran.result.summary["arms"][0]["hit_rate"] == 1.0


async def test_any_openai_address_will_do(make_house: MakeHouse, bench: Bench) -> None:
    """Here an engine by itself. What only a router tells is not there."""
    async with make_house() as house:
        ran = await bench(f"{house.decode.url}/v1", "--conversations", "2", "--turns", "2")
    assert ran.code == 0, ran.err
    result = ran.result
    assert [turn.outcome for turn in result.turns] == [None] * len(result.turns)
    assert all(turn.ttft_seconds is not None and turn.prompt_tokens for turn in result.turns)
    assert (result.retained, result.kv_capacity_tokens) == ([], None)
    assert result.summary["arms"][0]["hit_rate"] is None


async def test_contexts_are_met(make_house: MakeHouse, bench: Bench) -> None:
    async with make_house() as house:
        ran = await bench(house.proxy.url, *("--contexts", "1000", "3000", "--conversations", "2", "--warm-up", "0"))
    assert ran.code == 0, ran.err
    rows = ran.result.summary["contexts"]
    assert [row["context"] for row in rows] == ["1,000", "3,000"]
    for row, wanted in zip(rows, (1000, 3000), strict=True):
        assert abs(row["prompt_tokens"] - wanted) < 0.1 * wanted


async def test_a_wrong_key_is_told(make_house: MakeHouse, bench: Bench) -> None:
    async with make_house(admin_key=KEY) as house:
        ran = await bench(house.proxy.url, "--admin-key", "wrong")
    assert ran.code == 1
    assert "admin_key" in ran.err
    assert "403" in ran.err


async def test_a_key_for_what_is_no_router_is_told(make_house: MakeHouse, bench: Bench) -> None:
    async with make_house() as house:
        ran = await bench(house.decode.url, "--admin-key", KEY)
    assert ran.code == 1
    assert "is no Turnback router" in ran.err


async def test_a_trace_is_replayed_at_its_times(make_house: MakeHouse, bench: Bench, tmp_path: Path) -> None:
    lines = [
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 10.0, "input_length": 300, "output_length": 8}',
        '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 11.0, "input_length": 400, "output_length": 8}',
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    async with make_house() as house:
        ran = await bench(house.proxy.url, "--workload", "bailian", "--file", str(file), "--time-scale", "0.5")
    assert ran.code == 0, ran.err
    first, second = (turn for turn in ran.result.turns if turn.phase == "main")
    assert second.started_seconds - first.started_seconds >= 0.5
    assert second.reused
    for turn, wanted in ((first, 300), (second, 400)):
        assert abs((turn.prompt_tokens or 0) - wanted) < 0.1 * wanted


async def test_a_broken_file_ends_the_command_with_file_and_line(
    make_house: MakeHouse, bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("{}\n")
    async with make_house() as house:
        ran = await bench(house.proxy.url, "--workload", "mooncake", "--file", str(file))
    assert ran.code == 1
    assert f"{file}, line 1" in ran.err
    assert "Traceback" not in ran.err

"""`turnback bench` as a user runs it, against a router in front of simulated engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.result import Result, load
from proxy.cli import main
from tests.contract.conftest import MakeHouse

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


async def test_a_key_for_what_is_no_router_is_told(make_house: MakeHouse, bench: Bench) -> None:
    async with make_house() as house:
        ran = await bench(house.decode.url, "--admin-key", KEY)
    assert ran.code == 1
    assert "is no Turnback router" in ran.err

"""`turnback bench` in front of real engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.result import load
from deploy.local.pair import Pair
from proxy.cli import main
from tests.e2e.conftest import settings
from tests.running import running

pytestmark = pytest.mark.e2e

KEY = "of the admin"


async def test_both_arms_answer_alike_and_only_one_reuses(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNBACK_BENCH_ADMIN_KEY", KEY)
    async with running(settings(pair, admin_key=KEY)) as router:
        await router.probed()
        code = await asyncio.to_thread(
            main,
            [
                *("bench", "--url", router.url, "--output", str(tmp_path / "real"), "--require-equal"),
                *("--conversations", "2", "--turns", "3", "--warm-up", "1"),
                *("--system-tokens", "200", "--tool-tokens", "100..150", "--answer-tokens", "16"),
            ],
        )
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    result = load(tmp_path / "real.json")
    counted = [turn for turn in result.turns if turn.phase == "main"]
    assert len(counted) == 12
    assert {turn.outcome for turn in counted if turn.arm == "off"} == {"off"}
    on = {
        turn.turn: [other.outcome for other in counted if (other.arm, other.turn) == ("on", turn.turn)]
        for turn in counted
    }
    assert on == {1: ["first"] * 2, 2: ["hit"] * 2, 3: ["hit"] * 2}
    assert (result.summary["compared"], result.summary["equal"]) == (6, 6)
    # Lengths are estimates; this model's words and template are measured by the bench itself.
    opening = [turn.prompt_tokens or 0 for turn in counted if turn.turn == 1]
    assert 300 * 0.9 < min(opening) <= max(opening) < 350 * 1.1

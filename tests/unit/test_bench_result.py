"""The file that `turnback bench` writes and `turnback advise` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.failure import BenchFailure
from bench.result import Result, Retained, TurnResult, load, save

RESULT = Result(
    created="2026-01-01T00:00:00+00:00",
    settings={"seed": 0},
    arms=["off", "on"],
    workload={"name": "synthetic"},
    turns=[
        TurnResult(arm="on", conversation=3, turn=2, phase="main", outcome="hit", started_seconds=1.5),
        TurnResult(arm="off", conversation=3, turn=2, phase="past_ttl", error="status 500", started_seconds=2.0),
    ],
    retained=[Retained(at_seconds=1.0, worker="http://d:1", entries=1, tokens=300, share=0.25)],
    kv_capacity_tokens={"http://d:1": 1200},
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(RESULT, tmp_path / "result.json")
    assert load(tmp_path / "result.json") == RESULT
    assert [turn.reused for turn in RESULT.turns] == [True, False]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not a result"),
        ("{}", "is not a result"),
        ('{"turnback_bench": 2, "created": "", "settings": {}, "arms": [], "workload": {}, "turns": []}', "version 2"),
    ],
)
def test_another_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(BenchFailure, match=f"other.json.*{said}"):
        load(file)


def test_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFailure, match=r"cannot read .*none\.json"):
        load(tmp_path / "none.json")
    with pytest.raises(BenchFailure, match=r"cannot write .*none/result\.json"):
        save(RESULT, tmp_path / "none" / "result.json")

"""The overhead bench at its smallest: that it still measures what it says, and notices what is wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from bench.overhead.prompts import ANSWER_PIECES, asks, token, tokenise
from deploy.local.layout import PROJECT

TINY = ("--bodies", "5000", "--clients", "2", "--rounds", "1", "--seconds", "0.3")


async def bench(*arguments: str) -> tuple[int | None, str]:
    """Exit code, and what it said on standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.overhead", *TINY, *arguments),
        cwd=PROJECT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()


async def test_turnback_is_measured_in_first_turns_and_in_turns_that_reuse(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    modes = ("whole", "stream", "paced")
    code, said = await bench("--routers", "none", "turnback", "--modes", *modes, "--json", str(written))
    assert code == 0, said

    result = json.loads(written.read_text())
    assert result["turnback_overhead"] == 1
    cells = {(c["router"], c["streams"], c["reuse"], c["pace"] > 0): c for c in result["cells"]}
    kinds = [(False, False, False), (True, False, False), (True, False, True)]
    reusing = [(False, True, False), (True, True, False)]
    wanted = {("no router", *kind) for kind in kinds} | {("turnback", *kind) for kind in [*kinds, *reusing]}
    assert set(cells) == wanted
    for (router, *_), cell in cells.items():
        median = cell["median"]
        assert median["turns"] > 0
        assert 0 < median["first_p50"] <= median["p50"] <= median["p99"]
        assert (median["cpu_per_turn"] > 0) == (router == "turnback")
        assert (cell["added_p50"] is None) == (router == "no router")
    assert cells["turnback", True, False, False]["memory"] > 10_000_000
    assert [(event["router"], event["body"]) for event in result["events"]] == [("turnback", 5000)]


async def test_turns_that_do_not_reuse_as_they_should_end_the_run() -> None:
    code, said = await bench("--routers", "turnback", "--modes", "whole", "--router-arg=--no-reuse")
    assert code == 1
    assert "reuse should be first, and the router says x-turnback-reuse: off" in said


def test_bodies_have_the_size_that_is_asked_for_and_a_second_turn_begins_with_what_decode_holds() -> None:
    for size in (1000, 4000, 50_000):
        for streams in (True, False):
            made = asks(size, streams=streams)
            assert len(made.first.body) == len(made.following.body) == size
            held = tokenise(made.opening.members["messages"]) + [token(piece) for piece in ANSWER_PIECES]
            assert tokenise(made.following.members["messages"])[: len(held)] == held

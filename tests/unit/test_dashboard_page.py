"""The figures of the page from the metrics, and the newest turns of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deploy.local.layout import PROJECT
from proxy.dashboard import Newest, ToldTurn, figures_of
from proxy.dashboard.figures import ContextTurns, OutcomeTurns, PromptTokens, Ttft, WorkerFigures
from proxy.dashboard.newest import NEWEST
from tests.running import eventually


def test_the_figures_are_those_of_the_turns() -> None:
    registry = CollectorRegistry()
    turns = Counter("turnback_turns", "-", ("endpoint", "outcome", "reason"), registry=registry)
    tokens = Counter("turnback_prompt_tokens", "-", ("fate",), registry=registry)
    ttft = Histogram(
        "turnback_context_ttft_seconds", "-", ("context", "reused"), buckets=(0.1, 0.2, 0.4), registry=registry
    )
    Gauge("turnback_turns_running", "-", registry=registry).set(3)
    Gauge("turnback_turns_queued", "-", registry=registry).set(1)
    turns.labels("chat", "hit", "all_held").inc(4)
    turns.labels("completions", "hit", "all_held").inc()
    turns.labels("chat", "first", "nothing_retained").inc(2)
    tokens.labels("reused").inc(3_000)
    tokens.labels("new").inc(500)
    for context, reused, seconds in [
        (">128k", "no", 0.3), ("<=1k", "yes", 0.05), ("<=1k", "yes", 0.15), ("<=1k", "no", 7),
        ("8k-16k", "yes", 0.2), ("1k-2k", "no", 0.15), ("128k-256k", "no", 0.1),
    ]:  # fmt: skip
        ttft.labels(context, reused).observe(seconds)
    # One that has had no turn yet, though it is there.
    ttft.labels("2k-4k", "yes")

    figures = figures_of(registry.collect())
    assert (figures.running, figures.queued) == (3, 1)
    assert figures.turns == [OutcomeTurns("first", "nothing_retained", 2), OutcomeTurns("hit", "all_held", 5)]
    assert figures.prompt_tokens == PromptTokens(reused=3_000, recomputed=0, new=500, unknown=0)
    assert figures.ttft.bounds == [0.1, 0.2, 0.4]
    assert figures.ttft.contexts[:3] == [
        ContextTurns("<=1k", [1, 1, 0, 0], [0, 0, 0, 1]),
        ContextTurns("1k-2k", [0, 0, 0, 0], [0, 1, 0, 0]),
        ContextTurns("8k-16k", [0, 1, 0, 0], [0, 0, 0, 0]),
    ]
    assert {one.context for one in figures.ttft.contexts[3:]} == {">128k", "128k-256k"}


def test_workers_have_their_own_figures() -> None:
    registry = CollectorRegistry()

    def gauge(name: str, *labels: str) -> Gauge:
        return Gauge(f"turnback_{name}", "-", labels, registry=registry)

    gauge("worker_in_flight", "role", "worker").labels("prefill", "http://p").set(2)
    gauge("worker_breaker_open", "role", "worker").labels("prefill", "http://p").set(1)
    started = gauge("worker_start_time_seconds", "role", "worker")
    started.labels("decode", "http://d").set(1_700_000_000)
    started.labels("prefill", "http://p").set(0)
    gauge("worker_kv_usage", "role", "worker").labels("decode", "http://d").set(0.5)
    gauge("worker_kv_capacity_tokens", "role", "worker").labels("decode", "http://d").set(16_000)
    gauge("retained_entries", "worker").labels("http://d").set(3)
    gauge("retained_tokens", "worker").labels("http://d").set(4_000)
    gauge("retained_share", "worker").labels("http://d").set(0.25)
    assert figures_of(registry.collect()).workers == {
        ("decode", "http://d"): WorkerFigures(
            started_at=1_700_000_000, kv_usage=0.5, kv_capacity_tokens=16_000,
            retained_entries=3, retained_tokens=4_000, retained_share=0.25,
        ),
        ("prefill", "http://p"): WorkerFigures(in_flight=2, breaker_open=True),
    }  # fmt: skip


def test_without_any_metrics_there_is_nothing_to_tell() -> None:
    figures = figures_of(CollectorRegistry().collect())
    assert figures.turns == []
    assert figures.ttft == Ttft([], [])
    assert figures.prompt_tokens == PromptTokens(0, 0, 0, 0)


def turn(at: float, conversation: str = "abc") -> ToldTurn:
    return ToldTurn(
        at=at, endpoint="chat", conversation=conversation, turn=1, outcome="first", reason="nothing_retained",
        status=200, prompt_tokens=10, reused_tokens=0, ttft_seconds=0.1, seconds=0.2, prefill="p", decode="d",
    )  # fmt: skip


async def test_only_the_newest_turns_are_kept() -> None:
    newest = Newest(None)
    for at in range(NEWEST + 10):
        newest.add(turn(at))
    assert [one.at for one in await newest.all()] == list(range(NEWEST + 9, 9, -1))


async def test_turns_of_other_processes_are_seen_and_broken_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "newest-1.json").write_bytes(msgspec.json.encode([turn(5, "other"), turn(1, "other")]))
    (tmp_path / "newest-2.json").write_bytes(b'[{"at": 1')
    (tmp_path / "newest-3.json").write_bytes(b'[{"of": "another version"}]')
    (tmp_path / "newest-4.json").mkdir()
    (tmp_path / "counter_1.db").write_bytes(b"of the metrics")
    # Of an earlier process with the same id; what this one keeps is newer.
    (tmp_path / f"newest-{os.getpid()}.json").write_bytes(msgspec.json.encode([turn(7, "before")]))
    newest = Newest(tmp_path)
    newest.add(turn(3, "own"))
    assert [(one.at, one.conversation) for one in await newest.all()] == [(5, "other"), (3, "own"), (1, "other")]


async def test_others_see_its_turns_and_it_writes_only_what_is_new(tmp_path: Path) -> None:
    newest = Newest(tmp_path)
    newest.start()
    try:
        file = tmp_path / f"newest-{os.getpid()}.json"
        newest.add(turn(1))
        await eventually(file.exists)
        first = file.stat().st_ino
        newest.add(turn(2))
        newest.add(turn(3))
        await eventually(lambda: len(msgspec.json.decode(file.read_bytes(), type=list[ToldTurn])) == 3)
        assert file.stat().st_ino != first, "it is replaced, never half written"
        assert os.listdir(tmp_path) == [file.name]
    finally:
        await newest.stop()


async def test_a_folder_that_cannot_be_written_to_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def full(path: Path, data: bytes) -> int:
        tries.append(path)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr("proxy.dashboard.newest._WRITE_EVERY_SECONDS", 0.01)
    newest = Newest(tmp_path)
    newest.start()
    try:
        newest.add(turn(1))
        await eventually(lambda: len(tries) >= 1)
        newest.add(turn(2))
        await eventually(lambda: len(tries) >= 2)
        assert [one.at for one in await newest.all()] == [2, 1]
    finally:
        await newest.stop()


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    packages = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for name in {package.partition(".")[0] for package in packages}:
        copytree(PROJECT / name, source / name, ignore=ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        copy(PROJECT / name, source)
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    page = {str(path.relative_to(PROJECT)) for path in (PROJECT / "proxy/dashboard/page").iterdir()}
    assert "proxy/dashboard/page/index.html" in page
    assert page <= set(zipfile.ZipFile(wheel).namelist())

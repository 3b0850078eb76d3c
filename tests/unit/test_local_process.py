"""Nothing that is started here outlives its owner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.local.failure import LocalFailure
from deploy.local.process import Process
from tests.processes import alive

PROJECT = Path(__file__).parents[2]
# A command with a child in its own session, as an engine's workers may be. Both pids are written to a file.
PARENT = (
    "import os, subprocess, sys, time; from pathlib import Path\n"
    "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    "Path(sys.argv[1] + '.new').write_text(f'{os.getpid()} {child.pid}')\n"
    "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    "time.sleep(60)"
)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids_in(file: Path) -> list[int]:
    assert eventually(file.exists)
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize("end", [Process.stop, Process.kill])
def test_ending_it_ends_what_it_started(tmp_path: Path, end: Callable[[Process], None]) -> None:
    process = Process("parent", [sys.executable, "-c", PARENT, str(tmp_path / "pids")], log=tmp_path / "log", grace=1.0)
    pids = pids_in(tmp_path / "pids")
    assert pids[0] == process.pid
    assert process.exit_code is None
    end(process)
    assert not any(alive(pid) for pid in pids)
    assert process.exit_code == 128 + (signal.SIGTERM if end is Process.stop else signal.SIGKILL)


def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from deploy.local.process import Process\n"
        f"Process('parent', [sys.executable, '-c', {PARENT!r}, sys.argv[1]], log=Path(sys.argv[2]), grace=1.0)\n"
        "time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pids"), str(tmp_path / "log")], cwd=PROJECT)
    pids = pids_in(tmp_path / "pids")
    owner.kill()
    owner.wait()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process = Process("deaf", [sys.executable, "-c", code], log=tmp_path / "log", grace=0.2)
    assert eventually(lambda: "\ndeaf" in (tmp_path / "log").read_text())
    process.stop()
    assert process.exit_code == 128 + signal.SIGKILL


def test_one_that_ends_by_itself_tells_its_code_and_stopping_it_is_harmless(tmp_path: Path) -> None:
    process = Process("brief", [sys.executable, "-c", "raise SystemExit(3)"], log=tmp_path / "log")
    assert eventually(lambda: process.exit_code is not None)
    assert process.exit_code == 3
    process.stop()
    assert process.exit_code == 3


def test_it_runs_on_the_core_it_was_given(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    process = Process("pinned", ["sleep", "60"], log=tmp_path / "log", core=core)
    assert os.sched_getaffinity(process.pid) == {core}
    process.kill()


def test_a_command_that_does_not_exist_is_told_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(LocalFailure, match="ghost could not be started") as caught:
        Process("ghost", [str(tmp_path / "nothing")], log=tmp_path / "log")
    assert "FileNotFoundError" in str(caught.value)

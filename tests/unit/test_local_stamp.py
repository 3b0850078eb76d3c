"""What is built is built again exactly when it has to be, and by one process at a time."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deploy.local.stamp import Stamp, digest, exclusive, source_files


def test_a_stamp_holds_only_the_digest_it_was_given(tmp_path: Path) -> None:
    stamp = Stamp(tmp_path / "stamps" / "base")
    assert not stamp.holds("a")
    with stamp.replaced_by("a"):
        pass
    assert stamp.holds("a")
    assert not stamp.holds("b")


def test_an_interrupted_build_leaves_no_stamp(tmp_path: Path) -> None:
    stamp = Stamp(tmp_path / "base")
    with stamp.replaced_by("a"):
        pass
    with pytest.raises(KeyboardInterrupt), stamp.replaced_by("b"):
        raise KeyboardInterrupt
    assert not stamp.holds("a")
    assert not stamp.holds("b")


def test_the_digest_follows_contents_names_and_strings(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("x")
    two.write_text("x")
    before = digest([one], "3.11")
    assert digest([one], "3.11") == before
    assert digest([two], "3.11") != before
    assert digest([one], "3.12") != before
    one.write_text("y")
    assert digest([one], "3.11") != before


def test_what_builds_leave_behind_is_not_source(tmp_path: Path) -> None:
    kept = ["pyproject.toml", "package/module.py"]
    left = ["build/lib/module.py", "package/__pycache__/module.pyc", "package.egg-info/PKG-INFO", ".cache/x"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in source_files(tmp_path)] == sorted(kept)


def test_a_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "below" / "lock"
    code = "import sys; from pathlib import Path; from deploy.local.stamp import exclusive\n"
    code += "with exclusive(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    entered = threading.Event()

    def enter() -> None:
        with exclusive(lock):
            entered.set()

    waiter = threading.Thread(target=enter)
    waiter.start()
    assert not entered.wait(0.1)
    other.communicate("")
    assert entered.wait(10)
    waiter.join()

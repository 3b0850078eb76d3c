"""The command as a user types it, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from deploy.local.ports import free_port
from tests.redis_server import GENEROUS

WORKERS = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]


def run(*arguments: str, as_module: bool = False) -> subprocess.CompletedProcess[str]:
    command = (
        [sys.executable, "-m", "proxy.cli"] if as_module else [str(Path(sysconfig.get_path("scripts"), "turnback"))]
    )
    return subprocess.run(
        [*command, *arguments], env=environment(), capture_output=True, text=True, timeout=2 * GENEROUS, check=False
    )


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TURNBACK_")}


@pytest.mark.parametrize("as_module", [False, True])
def test_serve_without_prefill_says_so_in_one_line(as_module: bool) -> None:
    done = run("serve", "--decode", "http://d:1", as_module=as_module)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "prefill" in done.stderr


def test_wrong_url_says_so_in_one_line() -> None:
    done = run("serve", "--prefill", "p:1", "--decode", "http://d:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "'p:1'" in done.stderr


def test_unknown_key_in_the_file_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "turnback.yaml"
    file.write_text("prefil: [http://p:1]\n")
    done = run("serve", *WORKERS, "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "prefil: no such setting" in done.stderr


def test_unknown_option_is_named() -> None:
    done = run("serve", *WORKERS, "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_command_is_a_usage_error() -> None:
    done = run()
    assert done.returncode == 2
    assert "serve" in done.stderr


def test_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"turnback {version('turnback')}\n")


def test_help_names_the_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "serve" in done.stdout


def test_help_of_serve_names_every_option() -> None:
    done = run("serve", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--prefill", "--decode", "--render", "--store", "--host", "--port", "--workers", "--config"):
        assert option in done.stdout
    assert "URLs of the prefill workers" in done.stdout


def test_port_that_is_taken_ends_the_command_with_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", *WORKERS, "--port", str(taken.getsockname()[1]))
    assert done.returncode not in (0, 2)
    assert "address already in use" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_ends_when_told(stop: signal.Signals) -> None:
    """No worker need be there for that."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy.cli", "serve", *WORKERS, "--port", str(port)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout or []), daemon=True)
    reader.start()
    try:
        end = time.monotonic() + GENEROUS
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=GENEROUS)
                break
            except httpx.TransportError:
                assert process.poll() is None, "".join(said)
                assert time.monotonic() < end, "".join(said)
                time.sleep(0.05)
        assert answer.status_code == 200
        process.send_signal(stop)
        assert process.wait(GENEROUS) in (0, -stop)
        reader.join(GENEROUS)
        assert not re.search("Traceback", "".join(said))
    finally:
        process.kill()
        process.wait(GENEROUS)


@pytest.mark.parametrize(("command", "library"), [("bench", "matplotlib"), ("advise", "numpy")])
def test_a_command_without_its_extra_says_what_to_install(command: str, library: str, tmp_path: Path) -> None:
    """A module of that name that cannot be imported stands in front of the library."""
    (tmp_path / f"{library}.py").write_text(f"raise ModuleNotFoundError('none', name={library!r})")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "proxy.cli", command],
        env={**environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=2 * GENEROUS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"turnback {command}: {library} is missing: pip install 'turnback[bench]'\n"

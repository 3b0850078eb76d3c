"""Ports, the router's command line and failures, without engines."""

import io
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.__main__ import main
from deploy.local.engine_env import REQUIREMENTS, pip_command, torch_requirement
from deploy.local.failure import LocalFailure, tail
from deploy.local.layout import Layout
from deploy.local.options import EngineOptions
from deploy.local.pair import Engine, Pair
from deploy.local.ports import RANGE, free_port, is_free
from deploy.local.progress import Progress
from deploy.local.serve import ServeOptions, router_command


def test_a_free_port_can_be_bound_and_is_none_of_those_taken() -> None:
    port = free_port()
    assert port in RANGE
    assert is_free(port)
    taken = set(RANGE[::2])
    assert not taken & {free_port(taken) for _ in range(5)}


def test_a_port_given_out_is_given_to_nobody_else_while_this_process_lives() -> None:
    """Two suites at once had one's client talk to the other's router: both had been told of the same free port."""
    first = free_port(beside=[1, 100])
    ours = {first, first + 1, first + 100}
    with pytest.raises(OSError, match="no free port"):
        free_port(set(RANGE) - ours)
    elsewhere = f"from deploy.local.ports import RANGE, free_port; free_port(set(RANGE) - {ours})"
    done = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True, check=False)
    assert "no free port" in done.stderr, done.stderr


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free(server.getsockname()[1])


def test_a_pair_has_four_ports_and_keeps_those_it_was_given(tmp_path: Path) -> None:
    pair = Pair(EngineOptions("prefill", port=8100), EngineOptions("decode"), Layout(tmp_path))
    ports = [port for engine in pair.engines for port in (engine.port, engine.side_channel_port)]
    assert len(set(ports)) == 4
    assert pair.prefill.url == "http://127.0.0.1:8100"


def test_an_engine_without_its_environment_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(LocalFailure, match=r"python -m deploy\.local setup"):
        Engine(EngineOptions("decode"), Layout(tmp_path)).start()


def test_an_engine_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    # Stands in for the environment: a `vllm` that gives up at once.
    (tmp_path / "engine" / "bin").mkdir(parents=True)
    (tmp_path / "engine" / "bin" / "python").touch()
    vllm = tmp_path / "engine" / "bin" / "vllm"
    vllm.write_text("#!/bin/sh\necho no such model\nexit 7\n")
    vllm.chmod(0o755)
    pair = Pair(layout=Layout(tmp_path))
    with pair, pytest.raises(LocalFailure, match=r"prefill engine ended with code 7") as caught:
        pair.wait_ready(timeout=10)
    assert "no such model" in str(caught.value)
    assert caught.value.log == pair.prefill.log


def test_the_router_is_told_its_workers_and_what_the_engines_were_told() -> None:
    options = ServeOptions(
        decode_engine=EngineOptions("decode", decoder_kv_blocks_ttl=45),
        store="redis://localhost/1",
        port=9000,
        router_args=("--log-level=debug",),
    )
    line = router_command(options, ["http://p"], ["http://d"])
    assert line == [
        *(sys.executable, "-m", "proxy.cli", "serve", "--prefill", "http://p", "--decode", "http://d"),
        *("--store", "redis://localhost/1", "--host", "127.0.0.1", "--port", "9000"),
        *("--decoder-kv-blocks-ttl", "45", "--log-level=debug"),
    ]


def test_one_kind_of_worker_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--prefill", "http://127.0.0.1:1"])
    assert caught.value.code == 2
    assert "both prefill and decode" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert f"Port {port} is in use" in capsys.readouterr().err


def test_extra_pip_arguments_come_from_the_environment() -> None:
    line = pip_command(Path("python"), ["install", "x"], {"TURNBACK_PIP_ARGS": "--index-url 'file:///a b'"})
    assert line[-4:] == ["install", "x", "--index-url", "file:///a b"]


def test_the_engines_requirements_are_exact_and_name_no_host() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert "//" not in "".join(lines)
    assert torch_requirement(REQUIREMENTS) == lines[0]
    assert "+" not in lines[0]


def test_the_end_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("\n".join(str(n) for n in range(100)))
    assert tail(log, lines=2) == "  98\n  99"


def test_progress_in_a_log_is_whole_lines_and_tells_a_failure() -> None:
    stream = io.StringIO()
    with pytest.raises(LocalFailure), Progress(stream).step("Building"):
        raise LocalFailure("no")
    first, last = stream.getvalue().splitlines()
    assert first == "Building ..."
    assert last.startswith("Building: failed (")

"""The command, its words, and what it does with what it cannot read."""

from __future__ import annotations

import io
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bench.advise.command import main
from bench.result import save
from deploy.local.ports import free_port
from proxy.cli import main as turnback
from tests.unit.advise_cases import result, seconds_of, turn
from tests.unit.test_advise_metrics import router, set_to


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A bench in which reuse pays, half of the pauses are 10 s and half 100 s, and the crossing is at 400 tokens."""
    chance = random.Random(5)
    turns = []
    for conversation in range(20):
        for number in range(1, 6):
            length = 1000 * number + 30 * conversation
            for arm, copied in (("off", 0), ("on", length - 1000 if number > 1 else 0)):
                ttft = seconds_of(length - copied, copied, compute=2e-4, copy=5e-5, start=0.06)
                pause = None if number == 1 else 10.0 if number % 2 else 100.0
                turns.append(
                    turn(
                        arm, conversation, number, ttft * chance.lognormvariate(0, 0.05), prompt_tokens=length,
                        reused_tokens=copied, pause_seconds=pause,
                    )
                )  # fmt: skip
    path = tmp_path / "good.json"
    save(result(turns, ttl_seconds=480.0, kv_capacity_tokens={"d": 10_000_000}), path)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A bench in which reuse makes it slower."""
    turns = [
        turn(arm, conversation, number, 0.2 if arm == "off" else 0.3 + conversation / 1000)
        for conversation in range(20) for number in (1, 2, 3) for arm in ("off", "on")
    ]  # fmt: skip
    path = tmp_path / "bad.json"
    save(result(turns), path)
    return path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, on one line."""
    return " ".join(capsys.readouterr().out.split())


def test_a_bench_in_which_it_pays(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(good)]) == 0
    text = said(capsys)
    assert "Does reuse pay here? Yes. 80 % of 100 turns reused something." in text
    assert "decoder_kv_blocks_ttl Set 120, on decode and on the router. 100 % of the returns come in time" in text
    assert "kv_recompute_threshold Set 4" in text
    assert "Copying is faster than computing from" in text


def test_a_bench_in_which_it_does_not_pay_gets_a_no(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert turnback(["advise", str(bad)]) == 0
    text = said(capsys)
    assert "Does reuse pay here? No." in text
    assert "ms later (" in text
    assert "--no-reuse" in text


def test_json_has_the_same(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(good), "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert (advice["pays"]["verdict"], advice["ttl"]["recommended"]) == ("yes", 120)
    assert advice["threshold"]["low"] < advice["threshold"]["crossing"] < advice["threshold"]["high"]


def test_what_is_set_now_can_be_told(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(good), "--decoder-kv-blocks-ttl", "120", "--kv-recompute-threshold", "400"])
    assert "Leave it at 120." in (text := said(capsys))
    assert "Leave it at 400." in text
    assert (
        "Set now: decoder_kv_blocks_ttl 120 and kv_recompute_threshold 400, as the options say; retained_share 0.5,"
        " the default, since nothing says what it is."
    ) in text


def test_a_bench_tells_the_ttl_it_was_told(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(good)])
    assert (
        "Set now: decoder_kv_blocks_ttl 480, as the bench was told; kv_recompute_threshold 64 and retained_share 0.5,"
        " the default"
    ) in said(capsys)


def test_memory_that_is_short_makes_the_ttl_short(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(good), "--turns-per-second", "50", "--retained-share", "0.4"])
    text = said(capsys)
    assert "Set 20," in text
    assert "120 s would keep 100 %, but" in text
    assert "retained_share allows 40 %" in text


def test_saved_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(router())
    assert main([str(path)]) == 0
    assert "94 % of 48 turns reused something" in (text := said(capsys))
    assert text.count("Cannot tell yet.") == 3
    monkeypatch.setattr("sys.stdin", io.StringIO(router()))
    assert main(["-"]) == 0
    assert "From the metrics on standard input." in said(capsys)


def test_what_is_set_is_told_by_the_metrics_unless_an_option_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(router(returns=50) + set_to(90, 128, 0.3))
    main([str(path)])
    text = said(capsys)
    assert (
        "Set now: decoder_kv_blocks_ttl 90, kv_recompute_threshold 128 and retained_share 0.3, as the metrics say."
    ) in text
    main([str(path), "--json", "--decoder-kv-blocks-ttl", "240", "--kv-recompute-threshold", "0"])
    advice = json.loads(capsys.readouterr().out)
    assert advice["current"] == {
        "ttl": 240,
        "threshold": 0,
        "retained_share": 0.3,
        "margin": 10,
        "origins": {"ttl": "option", "threshold": "option", "retained_share": "metrics"},
    }
    assert (advice["ttl"]["now"]["ttl"], advice["ttl"]["bound"]) == (240, 0.3)


def test_routers_that_do_not_agree_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(router() + set_to(90, 64, 0.3) + set_to(480, 64, 0.5))
    main([str(path)])
    text = said(capsys)
    assert "Set now: decoder_kv_blocks_ttl 480, kv_recompute_threshold 64 and retained_share 0.3, as the" in text
    assert "The routers do not agree on decoder_kv_blocks_ttl: 90 and 480. It should be the same on all." in text
    assert "do not agree on retained_share: 0.3 and 0.5." in text
    assert "do not agree on kv_recompute_threshold" not in text
    main([str(path), "--decoder-kv-blocks-ttl", "480"])
    assert "do not agree on decoder_kv_blocks_ttl" not in said(capsys)


def test_an_older_router_leaves_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(router())
    main([str(path)])
    assert (
        "Set now: decoder_kv_blocks_ttl 480, kv_recompute_threshold 64 and retained_share 0.5, the default, since"
    ) in said(capsys)


def test_memory_without_a_rate_says_from_what_it_is_reckoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(router(returns=50))
    main([str(path)])
    assert "from what decode holds at this moment" in said(capsys)
    main([str(path), "--turns-per-second", "1"])
    assert "from what decode holds at this moment" not in said(capsys)


class _Router(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(router().encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def running() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Router)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_several_running_routers(running: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", running, f"{running}/metrics"]) == 0
    assert "94 % of 96 turns" in said(capsys)


def test_what_cannot_be_read_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text('{"turnback_bench": 1, ')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "empty", "other.json", "broken.json", "binary", "."):
        assert main([str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("turnback advise: ")
        assert str(tmp_path) in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:{free}", "router:8000", "http://", "http://127.0.0.1:port"])
def test_a_router_that_cannot_be_reached_is_named_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = url.format(free=free_port())
    assert main(["--url", url]) == 2
    _, err = capsys.readouterr()
    assert url in err
    assert err.count("\n") == 1


def test_another_server_is_named(running: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{running}/other"]) == 2
    assert f"{running}/other" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["file", "--url", "http://r:1"]])
def test_either_a_file_or_a_router(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "either a file or --url" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "much"])
def test_numbers_that_make_no_sense_are_a_usage_error(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["file", f"--turns-per-second={wrong}"])
    assert ended.value.code == 2
    assert f"--turns-per-second: '{wrong}' is not a number above 0" in capsys.readouterr().err

"""Every setting from every source, and what is said about wrong ones."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from metadata_store.keys import derive_secret
from proxy.settings import CONVERSATION_ID_SOURCES, Settings
from proxy.settings_load import WrongSettings, load
from proxy.worker_spec import WorkerSpec

WORKERS = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def named(*urls: str) -> list[WorkerSpec]:
    """Workers of which nothing but the URL was said."""
    return [WorkerSpec(url) for url in urls]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("TURNBACK_"):
            monkeypatch.delenv(name)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(content: Any) -> str:
        path = tmp_path / "turnback.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return str(path)

    return write


def test_only_the_workers_must_be_set() -> None:
    settings = load(WORKERS)
    assert (settings.prefill, settings.decode) == (named("http://p:1"), named("http://d:1"))
    assert (settings.store, settings.host, settings.port, settings.workers) == ("memory://", "127.0.0.1", 8000, 1)
    assert (settings.kv_recompute_threshold, settings.decoder_kv_blocks_ttl) == (64, 480.0)
    assert settings.conversation_id_sources == list(CONVERSATION_ID_SOURCES)


def test_command_line_beats_environment_beats_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, yaml_file: Any
) -> None:
    file = yaml_file({"port": 1, "host": "0.0.0.1", "store_timeout": 0.1, "prefill": ["http://y:1"]})
    monkeypatch.setenv("TURNBACK_PORT", "2")
    monkeypatch.setenv("TURNBACK_HOST", "0.0.0.2")
    settings = load(["--config", file, "--port", "3", "--decode", "http://d:1"])
    assert settings.port == 3
    assert settings.host == "0.0.0.2"
    assert settings.store_timeout == 0.1
    assert settings.prefill == named("http://y:1")
    assert settings.probe_interval == 2.0


def test_file_can_be_named_in_the_environment(monkeypatch: pytest.MonkeyPatch, yaml_file: Any) -> None:
    monkeypatch.setenv("TURNBACK_CONFIG", yaml_file({"port": 77}))
    assert load(WORKERS).port == 77


def test_file_named_on_the_command_line_beats_that_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, yaml_file: Any
) -> None:
    monkeypatch.setenv("TURNBACK_CONFIG", "/no/such/file")
    assert load([*WORKERS, f"--config={yaml_file({'port': 78})}"]).port == 78


def test_empty_file_sets_nothing(yaml_file: Any) -> None:
    assert load([*WORKERS, "--config", yaml_file("# nothing yet\n")]).port == 8000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prefill", "http://a:1", "http://b:2"],
        ["--prefill", "http://a:1", "--prefill", "http://b:2"],
        ["--prefill", "http://a:1,http://b:2"],
        ["--prefill=http://a:1, http://b:2"],
        ["--prefill", "http://a:1", "http://b:2", "http://a:1/"],
    ],
)
def test_several_workers_in_any_spelling(arguments: list[str]) -> None:
    assert load([*arguments, "--decode", "http://d:1"]).prefill == named("http://a:1", "http://b:2")


def test_several_workers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNBACK_PREFILL", "http://a:1, http://b:2")
    monkeypatch.setenv("TURNBACK_DECODE", "http://d:1")
    settings = load([])
    assert (settings.prefill, settings.decode) == (named("http://a:1", "http://b:2"), named("http://d:1"))


@pytest.mark.parametrize("value", [["http://a:1", "http://b:2"], "http://a:1, http://b:2"])
def test_several_workers_in_the_file(yaml_file: Any, value: Any) -> None:
    file = yaml_file({"prefill": value, "decode": ["http://d:1"]})
    assert load(["--config", file]).prefill == named("http://a:1", "http://b:2")


@pytest.mark.parametrize("url", ["http://a:1/", "http://a:1/v1", "http://a:1/v1/", "http://a:1"])
def test_url_as_clients_write_it_is_that_of_the_worker(url: str) -> None:
    assert load(["--prefill", url, "--decode", "http://d:1"]).prefill == named("http://a:1")


@pytest.mark.parametrize("url", ["http://[::1]:8100", "http://[2001:db8::2]:8100/v1/"])
def test_ipv6_worker(url: str) -> None:
    assert load(["--prefill", url, "--decode", "http://d:1"]).prefill[0].url == url.removesuffix("/v1/")


def test_ranks_behind_a_url() -> None:
    specs = load(["--prefill", "http://p:1/v1#dp=8", "--decode", "http://d:1#dp=1"])
    assert specs.prefill == [WorkerSpec("http://p:1", data_parallel_size=8)]
    assert specs.decode == named("http://d:1")


def test_worker_in_the_file_may_have_a_key_and_ranks(yaml_file: Any) -> None:
    workers = ["http://a:1#dp=2", {"url": "http://b:2/", "data_parallel_size": 4, "api_key": "hush"}]
    settings = load(["--config", yaml_file({"prefill": workers, "decode": "http://d:1"})])
    first, second = settings.prefill
    assert (first.url, first.data_parallel_size, first.api_key) == ("http://a:1", 2, None)
    assert (second.url, second.data_parallel_size) == ("http://b:2", 4)
    assert second.api_key is not None
    assert second.api_key.get_secret_value() == "hush"
    assert "hush" not in repr(settings) + str(settings)


def test_worker_named_twice_each_time_otherwise_is_a_mistake() -> None:
    with pytest.raises(WrongSettings, match=r"^prefill: http://p:1 is named twice"):
        load(["--prefill", "http://p:1", "http://p:1#dp=2", "--decode", "http://d:1"])


SAMPLES: dict[str, tuple[str, Any]] = {
    "prefill": ("https://x:2", named("https://x:2")),
    "decode": ("http://10.0.0.1#dp=2", [WorkerSpec("http://10.0.0.1", data_parallel_size=2)]),
    "render": ("http://r:1/v1", "http://r:1"),
    "store": ("redis://h:1/2", "redis://h:1/2"),
    "store_timeout": ("0.5", 0.5),
    "store_pause": ("0", 0.0),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "workers": ("4", 4),
    "reuse": ("false", False),
    "forward_authorization": ("true", True),
    "decoder_kv_blocks_ttl": ("60", 60.0),
    "decoder_kv_blocks_margin": ("2.5", 2.5),
    "kv_recompute_threshold": ("0", 0),
    "retained_share": ("1", 1.0),
    "retained_tokens_budget": ("0", 0),
    "idle_release": ("30", 30.0),
    "retained_watch_interval": ("0.5", 0.5),
    "abandon_grace": ("0", 0.0),
    "conversation_id_sources": ("header:x-a,body:b.c", ["header:x-a", "body:b.c"]),
    "max_body_bytes": ("10", 10),
    "connect_timeout": ("1", 1.0),
    "prefill_timeout": ("1.5", 1.5),
    "first_byte_timeout": ("2", 2.0),
    "gap_timeout": ("3", 3.0),
    "render_timeout": ("4", 4.0),
    "turn_timeout": ("5", 5.0),
    "max_turns_per_worker": ("0", 0),
    "queue_size": ("0", 0),
    "queue_timeout": ("6", 6.0),
    "drain_timeout": ("0", 0.0),
    "probe_interval": ("0.1", 0.1),
    "probe_timeout": ("0.2", 0.2),
    "policy": ("least_loaded", "least_loaded"),
    "affinity_factor": ("1", 1.0),
    "affinity_slack": ("0", 0),
    "health_up_after": ("1", 1),
    "health_down_after": ("5", 5),
    "breaker_failures": ("1", 1),
    "breaker_seconds": ("0.5", 0.5),
    "otlp_endpoint": ("http://c:4318/", "http://c:4318/v1/traces"),
    "trace_sample_ratio": ("0", 0.0),
    "log_level": ("warning", "warning"),
    "log_format": ("json", "json"),
}
SECRETS = ("secret", "worker_api_key", "admin_key")


def base(name: str) -> dict[str, Any]:
    """What must be set beside ``name``."""
    needed: dict[str, Any] = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}
    if name == "workers":
        needed["store"] = "redis://h"
    needed.pop(name, None)
    return needed


def test_every_setting_is_tried_below() -> None:
    assert {*SAMPLES, *SECRETS, "config"} == set(Settings.model_fields)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("source", ["option", "variable", "file"])
def test_setting_can_be_set_in_each_place(
    name: str, source: str, monkeypatch: pytest.MonkeyPatch, yaml_file: Any
) -> None:
    text, value = SAMPLES[name]
    arguments = ["--config", yaml_file(base(name))]
    if source == "option":
        option = f"--{name.replace('_', '-')}"
        arguments += {"reuse": ["--no-reuse"], "forward_authorization": [option]}.get(name, [option, text])
    elif source == "variable":
        monkeypatch.setenv(f"TURNBACK_{name.upper()}", text)
    else:
        in_file = text.split(",") if name in ("prefill", "decode") else value
        arguments = ["--config", yaml_file(base(name) | {name: in_file})]
    found = getattr(load(arguments), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_never_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TURNBACK_{name.upper()}", "hush")
    settings = load(WORKERS)
    assert getattr(settings, name).get_secret_value() == "hush"
    assert "hush" not in repr(settings) + str(settings)


WRONG: list[tuple[str, Any]] = [
    ("prefill", "worker:8000"),
    ("prefill", "ftp://p:1"),
    ("prefill", "http://"),
    ("prefill", "http://p:port"),
    ("prefill", "http://p:1?x=1"),
    ("decode", "decode"),
    ("decode", ""),
    ("render", "nowhere"),
    ("store", "mysql://x"),
    ("store", "memory"),
    ("store", "redis://h:port"),
    ("store", "redis://h/0?no_such_option=1"),
    ("store_timeout", "0"),
    ("store_timeout", "soon"),
    ("store_timeout", "-1"),
    ("store_pause", "-1"),
    ("port", "70000"),
    ("port", "x"),
    ("port", "-1"),
    ("workers", "0"),
    ("workers", "2"),
    ("reuse", "perhaps"),
    ("decoder_kv_blocks_ttl", "0"),
    ("decoder_kv_blocks_margin", "-1"),
    ("decoder_kv_blocks_margin", "480"),
    ("kv_recompute_threshold", "-1"),
    ("kv_recompute_threshold", "1.5"),
    ("conversation_id_sources", "x-conversation-id"),
    ("conversation_id_sources", "header:"),
    ("conversation_id_sources", "body:a.b.c"),
    ("conversation_id_sources", "cookie:id"),
    ("max_body_bytes", "0"),
    ("connect_timeout", "0"),
    ("prefill_timeout", "0"),
    ("first_byte_timeout", "0"),
    ("gap_timeout", "0"),
    ("render_timeout", "0"),
    ("turn_timeout", "0"),
    ("max_turns_per_worker", "-1"),
    ("queue_size", "-1"),
    ("queue_timeout", "0"),
    ("drain_timeout", "-1"),
    ("probe_interval", "0"),
    ("probe_timeout", "0"),
    ("decode", "http://d:1#dp=0"),
    ("decode", "http://d:1#dp=two"),
    ("decode", "http://d:1#rank=1"),
    ("policy", "best"),
    ("affinity_factor", "0.9"),
    ("affinity_slack", "-1"),
    ("health_up_after", "0"),
    ("health_down_after", "0"),
    ("breaker_failures", "0"),
    ("breaker_seconds", "0"),
    ("otlp_endpoint", "collector:4317"),
    ("otlp_endpoint", "grpc://c:4317"),
    ("otlp_endpoint", "http://c:4318?token=x"),
    ("trace_sample_ratio", "1.1"),
    ("trace_sample_ratio", "-0.1"),
    ("log_level", "loud"),
    ("log_format", "xml"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
@pytest.mark.parametrize("source", ["option", "variable", "file"])
def test_wrong_setting_is_named_in_one_line(
    name: str, value: str, source: str, monkeypatch: pytest.MonkeyPatch, yaml_file: Any
) -> None:
    needed = base(name)
    if name == "workers":
        del needed["store"]
    arguments = ["--config", yaml_file(needed)]
    if source == "option" and name != "reuse":
        arguments.append(f"--{name.replace('_', '-')}={value}")
    elif source != "file":
        monkeypatch.setenv(f"TURNBACK_{name.upper()}", value)
    else:
        arguments = ["--config", yaml_file(needed | {name: value})]
    with pytest.raises(WrongSettings) as raised:
        load(arguments)
    message = str(raised.value)
    assert "\n" not in message
    # What does not fit together is told by the name of the other one.
    assert name in message or (name == "workers" and message.startswith("store:"))


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_missing_workers_are_named(missing: str) -> None:
    given = {"prefill": "http://p:1", "decode": "http://d:1"}
    del given[missing]
    with pytest.raises(WrongSettings, match=f"^{missing}: ") as raised:
        load([part for name, url in given.items() for part in (f"--{name}", url)])
    assert "\n" not in str(raised.value)


def test_every_wrong_setting_is_told_at_once() -> None:
    with pytest.raises(WrongSettings) as raised:
        load(["--port", "x", "--gap-timeout", "0"])
    for name in ("prefill", "decode", "port", "gap_timeout"):
        assert f"{name}: " in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"prefil": ["http://p:1"]}, "prefil"),
        ({"config": "other.yaml"}, "config"),
        ("[1, 2]", "turnback.yaml"),
        ("just text", "turnback.yaml"),
        ("a: [1\nb: {", "turnback.yaml"),
        ("1: 2", "turnback.yaml"),
        ({"prefill": {"a": 1}}, "prefill"),
        ({"prefill": [1, 2]}, "prefill"),
        ({"prefill": [{"api_key": "x"}]}, "prefill.0.url"),
        ({"prefill": [{"url": "http://p:1", "key": "x"}]}, "prefill.0.key"),
        ({"prefill": [{"url": "http://p:1", "data_parallel_size": 0}]}, "prefill.0.data_parallel_size"),
        ({"port": [1]}, "port"),
        ({"store": None}, "store"),
    ],
)
def test_wrong_file_is_told_in_one_line(yaml_file: Any, content: Any, said: str) -> None:
    file = yaml_file(content)
    arguments = ["--config", file, *(() if isinstance(content, dict) and "prefill" in content else WORKERS[:2])]
    with pytest.raises(WrongSettings) as raised:
        load([*arguments, *WORKERS[2:]])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_is_told_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(WrongSettings, match=r"^config: cannot read") as raised:
            load([*WORKERS, "--config", str(path)])
        assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00port: 1")
    with pytest.raises(WrongSettings, match=r"^config: ") as raised:
        load([*WORKERS, "--config", str(path)])
    assert "\n" not in str(raised.value)


def test_replicas_on_one_redis_have_one_key_without_being_told() -> None:
    one, other = load([*WORKERS, "--store", "redis://h/0"]), load([*WORKERS, "--store", "redis://h/0"])
    assert one.secret_key == other.secret_key
    assert one.secret_key != load([*WORKERS, "--store", "redis://h/1"]).secret_key


def test_memory_store_has_a_random_key() -> None:
    assert load(WORKERS).secret_key != load(WORKERS).secret_key


def test_secret_that_is_set_makes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNBACK_SECRET", "x")
    assert load(WORKERS).secret_key == derive_secret("x")


def test_again_gives_what_the_file_says_now(yaml_file: Any) -> None:
    file = yaml_file({"prefill": "http://p:1", "decode": "http://d:1", "port": 1})
    settings = pickle.loads(pickle.dumps(load(["--config", file, "--host", "::"])))
    assert load(settings.arguments) == settings
    Path(file).write_text("prefill: [http://p:2]\ndecode: [http://d:1]\nhost: 0.0.0.0\n")
    again = load(settings.arguments)
    assert (again.prefill, again.port, again.host) == (named("http://p:2"), 8000, "::")
    Path(file).unlink()
    with pytest.raises(WrongSettings, match=r"^config: cannot read"):
        load(settings.arguments)


@pytest.mark.parametrize("arguments", [["--decode", "http://d:1"], ["--decode=http://d:1"]])
def test_who_sets_what_is_known(yaml_file: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("TURNBACK_PORT", "1")
    settings = load(["--config", yaml_file({"prefill": "http://p:1", "decode": "http://e:1"}), *arguments])
    assert not settings.beyond_the_file("prefill")
    assert settings.beyond_the_file("decode")
    assert settings.beyond_the_file("port")


def test_an_empty_admin_key_is_a_mistake() -> None:
    """As a variable that was to be filled in elsewhere; everybody would have that key."""
    with pytest.raises(WrongSettings, match=r"^admin_key: "):
        load([*WORKERS, "--admin-key", ""])

"""The image and the compose file, as far as they can be wrong without a Docker engine telling."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.layout import PROJECT, Layout
from deploy.local.options import EngineOptions, command
from proxy.settings import Settings

ENGINES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ROUTER_PORT = 8000


def interpolated(text: str, given: Mapping[str, str]) -> str:
    """``text`` as compose reads it: ``${NAME:-default}`` and ``${NAME:?message}``."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if name in given:
            return given[name]
        assert kind == "-", f"{name} was not given: {rest}"
        return rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def compose(**given: str) -> dict[str, Any]:
    text = (PROJECT / "deploy/compose.yaml").read_text()
    read: dict[str, Any] = yaml.safe_load(interpolated(text, {"MODEL": "some/model"} | given))
    return read


def kv_config(service: Mapping[str, Any]) -> dict[str, Any]:
    line = service["command"]
    read: dict[str, Any] = json.loads(line[line.index("--kv-transfer-config") + 1])
    return read


def router_settings(monkeypatch: pytest.MonkeyPatch, **given: str) -> Settings:
    """What the router makes of its environment."""
    for name, value in compose(**given)["services"]["router"]["environment"].items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    return Settings()


def dockerfile() -> list[str]:
    """Its instructions, each on one line."""
    text = re.sub(r"^#.*\n", "", (PROJECT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]


def copied() -> list[str]:
    """What the image is built from."""
    lines = [line.split()[1:-1] for line in dockerfile() if line.startswith("COPY ") and "--from" not in line]
    return [source for line in lines for source in line]


def test_all_that_is_copied_is_there_and_not_ignored() -> None:
    ignore = [line for line in (PROJECT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignore[0] == "*"
    for source in copied():
        assert (PROJECT / source).exists(), source
        assert f"!{source}" in ignore


def test_all_packages_are_copied() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    ignored = (PROJECT / ".dockerignore").read_text().splitlines()
    assert {package.partition(".")[0] for package in packages} <= set(copied())
    there = {
        ".".join(path.parent.relative_to(PROJECT).parts)
        for name in copied()
        for path in (PROJECT / name).rglob("__init__.py")
        if not any(path.is_relative_to(PROJECT / line) for line in ignored if line and line[0] not in "#!*")
    }
    assert there == set(packages)


def test_all_files_beside_the_modules_are_installed() -> None:
    setuptools = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {package: PROJECT / package.replace(".", "/") for package in setuptools["packages"]}
    installed = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in folders[package].glob(pattern)
    }
    there = {
        path
        for folder in folders.values()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert there == installed


def test_the_image_has_extras_that_there_are() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    default = next(line for line in dockerfile() if line.startswith("ARG EXTRAS=")).partition("=")[2]
    assert set(default.split(",")) <= set(extras)
    assert any('".[${EXTRAS}]"' in line for line in dockerfile())


def test_the_image_starts_what_the_project_installs() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    entry = next(line for line in dockerfile() if line.startswith("ENTRYPOINT "))
    assert json.loads(entry.removeprefix("ENTRYPOINT "))[0] in project["scripts"]
    users = [line.split()[1] for line in dockerfile() if line.startswith("USER ")]
    assert users
    assert "0" not in users[-1].split(":")


def test_every_variable_that_the_image_sets_is_a_setting() -> None:
    environment = next(line for line in dockerfile() if line.startswith("ENV "))
    for name in re.findall(r"TURNBACK_(\w+)=", environment):
        assert name.lower() in Settings.model_fields


class _Answering(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


class _Failing(_Answering):
    status = 503


def health_checks() -> list[list[str]]:
    """Of the image and of the engines, as commands."""
    of_image = next(line for line in dockerfile() if line.startswith("HEALTHCHECK "))
    checks = [json.loads(of_image.partition(" CMD ")[2])]
    checks += [compose()["services"][name]["healthcheck"]["test"][1:] for name in ENGINES]
    return checks


@pytest.mark.parametrize("check", health_checks())
@pytest.mark.parametrize(("handler", "healthy"), [(_Answering, True), (_Failing, False), (None, False)])
def test_health_checks_tell(check: list[str], handler: type[_Answering] | None, healthy: bool) -> None:
    assert check[0] in ("python", "python3")
    assert check[1] == "-c"
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler or _Answering)
    port = server.server_port
    if handler is None:
        server.server_close()
    else:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        code = check[2].replace("8000", str(port))
        # A proxy for outgoing requests must not be asked.
        done = subprocess.run(
            [sys.executable, "-c", code], env={"http_proxy": "http://127.0.0.1:1"}, capture_output=True, check=False
        )
    finally:
        if handler is not None:
            server.shutdown()
            server.server_close()
    assert (done.returncode == 0) is healthy, done.stderr


def test_every_variable_of_the_router_is_a_setting_with_a_good_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in compose()["services"]["router"]["environment"]:
        assert name.removeprefix("TURNBACK_").lower() in Settings.model_fields
    settings = router_settings(monkeypatch)
    services = compose()["services"]
    for role, urls in (("prefill", settings.prefill), ("decode", settings.decode)):
        assert [spec.url for spec in urls] == [f"http://{role}:8000"]
        assert "--port=8000" in services[role]["command"]
    assert re.fullmatch(r"redis://(\w+):6379/0", settings.store)
    assert "redis" in services


@pytest.mark.parametrize("given", [{}, {"DECODER_KV_BLOCKS_TTL": "120", "KV_RECOMPUTE_THRESHOLD": "256"}])
def test_router_and_engines_agree(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    settings = router_settings(monkeypatch, **given)
    services = compose(**given)["services"]
    decode, prefill = (kv_config(services[role])["kv_connector_extra_config"] for role in ("decode", "prefill"))
    assert decode["decoder_kv_blocks_ttl"] == settings.decoder_kv_blocks_ttl
    assert prefill["kv_recompute_threshold"] == settings.kv_recompute_threshold
    if not given:
        assert settings == Settings(prefill=settings.prefill, decode=settings.decode, store=settings.store)


@pytest.mark.parametrize(("role", "kv_role"), ENGINES.items())
def test_engines_are_started_as_in_the_end_to_end_tests(role: str, kv_role: str) -> None:
    service = compose()["services"][role]
    tried = command(EngineOptions("prefill" if role == "prefill" else "decode"), Layout(Path("/")), 1)
    flags = {part.partition("=")[0] for part in service["command"] if part.startswith("--")}
    assert flags <= {part for part in tried if part.startswith("--")}
    assert "--enable-scale-out" in flags
    config = kv_config(service)
    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_role"] == kv_role
    assert config["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True


def test_each_engine_tells_a_name_that_the_other_can_reach() -> None:
    services = compose()["services"]
    for role in ENGINES:
        assert services[role]["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == role
        assert services[role]["hostname"] == role
        assert services[role]["ipc"] == "host"


def test_each_engine_has_a_gpu_of_its_own() -> None:
    services = compose()["services"]
    devices = [services[role]["deploy"]["resources"]["reservations"]["devices"][0] for role in ENGINES]
    assert all(device["capabilities"] == ["gpu"] for device in devices)
    assert len({str(device["device_ids"]) for device in devices}) == 2


def test_redis_brings_nothing_back() -> None:
    line = compose()["services"]["redis"]["command"]
    assert line[line.index("--save") + 1] == ""
    assert line[line.index("--appendonly") + 1] == "no"


def mounted(service: str) -> dict[str, Path]:
    """What a service finds where, of this folder."""
    volumes = [volume.split(":") for volume in compose()["services"][service]["volumes"]]
    return {inside: PROJECT / "deploy" / outside for outside, inside, *_ in volumes if outside.startswith(".")}


def test_prometheus_scrapes_what_there_is() -> None:
    services = compose()["services"]
    files = mounted("prometheus")
    inside = Path("/etc/prometheus/prometheus.yml")
    assert f"--config.file={inside}" in services["prometheus"]["command"]
    config = yaml.safe_load(files[str(inside)].read_text())
    targets = {
        target for job in config["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    }
    assert targets == {"router:8000", "prefill:8000", "decode:8000"}
    assert services["router"]["ports"][0].endswith(f":{ROUTER_PORT}")
    assert Settings.model_fields["port"].default == ROUTER_PORT
    for name in config["rule_files"]:
        assert files[str(inside.with_name(name))].exists()


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = compose()["services"]
    files = mounted("grafana")
    provisioning = files["/etc/grafana/provisioning"]
    source = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"][0]
    name, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert services[name]["ports"][0].endswith(f":{port}")
    interval = yaml.safe_load(mounted("prometheus")["/etc/prometheus/prometheus.yml"].read_text())["global"]
    assert source["jsonData"]["timeInterval"] == interval["scrape_interval"]
    provider = yaml.safe_load((provisioning / "dashboards/turnback.yml").read_text())["providers"][0]
    board = next(inside for inside in files if inside.endswith(".json"))
    assert board.startswith(provider["options"]["path"] + "/")
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
    assert json.loads(files[board].read_text())["title"] == "Turnback"


def test_services_depend_on_services() -> None:
    services = compose()["services"]
    for needed in services["router"]["depends_on"]:
        assert needed in services
        if services["router"]["depends_on"][needed]["condition"] == "service_healthy":
            assert "healthcheck" in services[needed]

"""What the README says of settings, outcomes, endpoints, metrics and log lines is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import Metric
from pydantic import SecretStr
from starlette.routing import Route

from bench.multiturn.settings import BenchSettings
from deploy.local.layout import PROJECT
from metadata_store.connections import SCHEMES
from proxy.app import create_app
from proxy.conversation import LONGEST_ID
from proxy.settings import CONVERSATION_ID_SOURCES, Settings
from proxy.telemetry import Metrics
from proxy.worker_spec import WorkerSpec
from router.fingerprint import COARSE_STEP, STEP, TAIL
from router.reuse import Outcome, Reason

BENCH = BenchSettings.model_config["env_prefix"]
README = (PROJECT / "README.md").read_text()


def section(title: str) -> str:
    """What stands below a heading, up to the next of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables' rows, heads included."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def first_column(text: str) -> list[str]:
    """The first thing in backticks of each row that begins with one."""
    return [codes(row[0])[0] for row in rows(text) if row[0].startswith("`")]


def spelled(default: Any) -> str:
    """A default as the table has it."""
    match default:
        case []:
            return ""
        case None:
            return "none"
        case bool():
            return str(default).lower()
        case list():
            return ",".join(default)
        case int() | float():
            return str(int(default)) if default == int(default) else str(default)
    return str(default)


def test_every_setting_is_listed_with_its_names_and_default() -> None:
    listed = {codes(row[0])[0]: row for row in rows(section("Settings")) if row[0].startswith("`")}
    assert set(listed) == {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        option, variable, default, meaning = listed[f"--{name.replace('_', '-')}"]
        assert codes(option)[1:] == (["--no-reuse"] if name == "reuse" else []), name
        assert codes(variable) == [f"TURNBACK_{name.upper()}"]
        assert "".join(codes(default)) == spelled(field.default), name
        assert meaning, name


def test_variables_named_anywhere_are_settings() -> None:
    for name in set(re.findall(r"\bTURNBACK_[A-Z_]+", README)) - {"TURNBACK_PIP_ARGS"}:
        fields = BenchSettings.model_fields if name.startswith(BENCH) else Settings.model_fields
        assert name.removeprefix(BENCH).removeprefix("TURNBACK_").lower() in fields, name


def test_choices_are_told() -> None:
    for name in ("policy", "log_level", "log_format"):
        row = next(row for row in rows(section("Settings")) if f"TURNBACK_{name.upper()}" in row[1])
        assert codes(row[3]) == list(Settings.model_fields[name].annotation.__args__)  # type: ignore[union-attr]


def test_stores_are_told() -> None:
    for scheme in SCHEMES:
        assert scheme.replace("rediss", "redis") in section("Several replicas")


def test_the_rights_in_redis_are_those_that_an_error_names() -> None:
    rights = re.findall(r"\+[a-z|]+", (PROJECT / "metadata_store/redis.py").read_text())
    assert rights
    assert re.findall(r"(?<=[ `])\+[a-z|]+", section("Several replicas")) == rights


def test_sources_of_the_conversation_id_are_told_in_order() -> None:
    told = re.findall(r"^\d\. (header|member) `([^`]+)`", section("Conversation ids"), re.MULTILINE)
    kinds = {"header": "header", "member": "body"}
    assert [f"{kinds[kind]}:{name.lower()}" for kind, name in told] == list(CONVERSATION_ID_SOURCES)
    assert f"up to {LONGEST_ID} characters" in section("Conversation ids")


def test_outcomes_and_reasons_are_all_explained() -> None:
    listed = first_column(section("Outcomes"))
    assert listed[: len(Outcome)] == [str(outcome) for outcome in Outcome]
    assert set(listed[len(Outcome) :]) == reasons_given()
    for row in rows(section("Outcomes"))[-len(reasons_given()) :]:
        assert row[1] in (*Outcome, ""), row


def reasons_given() -> set[str]:
    """The values of the reasons that the code gives anywhere."""
    found = {name for path in sources() for name in re.findall(r"\bReason\.([A-Z_]+)", path.read_text())}
    return {str(Reason[name]) for name in found}


def sources() -> Iterator[Path]:
    for package in ("proxy", "router", "metadata_store"):
        yield from (PROJECT / package).rglob("*.py")


def test_endpoints_are_those_there_are() -> None:
    app = create_app(
        Settings(prefill=[WorkerSpec("http://p:1")], decode=[WorkerSpec("http://d:1")], secret=SecretStr("x"))
    )
    there = {
        f"{method} {path}"
        for path, methods in all_routes(app)
        for method in methods
        if method != "HEAD" and path not in ("/openapi.json", "/docs/oauth2-redirect", "/redoc")
    }
    assert set(first_column(section("Endpoints"))) == there


def all_routes(app: Any) -> Iterator[tuple[str, set[str]]]:
    for path, operations in app.openapi()["paths"].items():
        yield path, {method.upper() for method in operations}
    for route in app.routes:
        if isinstance(route, Route):
            yield route.path, set(route.methods or ())


def exposed(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_metrics_are_those_there_are() -> None:
    families = {exposed(family): family for family in Metrics().registry.collect()}
    assert set(first_column(section("Metrics"))) == set(families)
    for row in rows(section("Metrics")):
        if row[0].startswith("`"):
            family = families[codes(row[0])[0]]
            assert row[2].startswith("histogram") is (family.type == "histogram"), row


def test_labels_are_those_of_the_metrics() -> None:
    metrics = Metrics()
    labels = {
        collector._name: collector._labelnames for collector in vars(metrics).values() if hasattr(collector, "_name")
    }
    for row in rows(section("Metrics")):
        if row[0].startswith("`"):
            assert tuple(codes(row[1])) == labels[codes(row[0])[0].removesuffix("_total")], row


def test_metrics_named_anywhere_exist() -> None:
    names = {exposed(family) for family in Metrics().registry.collect()}
    for name in set(re.findall(r"\bturnback_[a-z_]+", README)):
        assert name.removesuffix("_bucket") in names, name


def log_lines() -> dict[str, str]:
    """What the code logs: the line, and how bad it is."""
    lines = {}
    for path in (PROJECT / "proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) in ("log", "self._log")
            ):
                assert isinstance(node.args[0], ast.Constant), ast.unparse(node)
                lines[str(node.args[0].value)] = node.func.attr
    return lines


def test_log_lines_are_explained() -> None:
    told = {line for line in first_column(section("Troubleshooting")) if not line.startswith("turnback: ")}
    assert told == set(log_lines())


def test_headers_are_those_that_are_sent() -> None:
    sent = set(re.findall(r'b"(x-(?:turnback-[a-z-]+|request-id))"', (PROJECT / "proxy/routes/api.py").read_text()))
    assert set(first_column(section("Response headers"))) == sent


def test_all_options_of_the_bench_are_told_with_their_defaults() -> None:
    table = [row for row in rows(section("Measure it")) if row[0].startswith("`--") and len(row) == 3]
    told = {codes(row[0])[0]: (codes(row[1]) or [""])[0] for row in table}
    fields = BenchSettings.model_fields
    assert told == {f"--{name.replace('_', '-')}": spelled(field.default) for name, field in fields.items()}
    workloads = [codes(row[0])[0] for row in rows(section("Measure it")) if row[0].startswith("`") and len(row) == 2]
    assert workloads == ["--workload", *get_args(fields["workload"].annotation)]


def test_links_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target[1:] in anchors if target.startswith("#") else (PROJECT / target).exists(), target


def test_make_targets_and_variables_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in ("PREFILL", "DECODE", "STORE", "PORT", "SERVE_ARGS", "BENCH_ARGS", "TURNBACK_PIP_ARGS"):
        assert name in README
        assert f"$({name})" in makefile or f",$({name})" in makefile


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_python_in_it_is_python(block: str) -> None:
    ast.parse(block)


def test_the_digests_are_as_said() -> None:
    told = f"one for every {STEP} tokens of the last {TAIL:,} and one for every {COARSE_STEP} before"
    assert told in section("Promises")

"""A real Prometheus scrapes real routers, and everything that the dashboard and the rules ask for is there."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.layout import PROJECT
from tests.contract.busy_house import busy_house
from tests.debian_prometheus import programs
from tests.prometheus_server import PrometheusServer
from tests.redis_server import RedisServer

FOLDER = PROJECT / "deploy/prometheus"
RECORDING, ALERTS = FOLDER / "recording.yml", FOLDER / "alerts.yml"
DASHBOARD = PROJECT / "deploy/grafana/turnback.json"
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "10s", "$__range": "1m"}
ZERO = " or vector(0)"
WITHIN = 240.0
"""Seconds in which all that is to be seen must have been seen at least once."""


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [programs().promtool, *arguments], cwd=FOLDER, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rules", [RECORDING, ALERTS])
def test_promtool_finds_nothing_wrong_with_the_rules(rules: Path) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", rules)


def test_promtool_finds_nothing_wrong_with_the_config() -> None:
    promtool("check", "config", "prometheus.yml")


def test_alerts_come_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts.test.yml")


def test_every_alert_has_a_case_in_which_it_comes() -> None:
    text = (FOLDER / "alerts.test.yml").read_text()
    for rule in rules(ALERTS):
        assert re.search(rf"alertname: {rule['alert']}\b.*\n +exp_alerts", text) or re.search(
            rf'alertname="{rule["alert"]}", alertstate="firing", ', text
        ), rule["alert"]


def test_every_alert_says_what_to_do() -> None:
    for rule in rules(ALERTS):
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


async def test_prometheus_answers_every_query_of_the_dashboard_and_every_rule(redis_server: RedisServer) -> None:
    async with (
        busy_house(redis_server) as house,
        PrometheusServer({"turnback": house.routers}, [RECORDING, ALERTS]) as prometheus,
    ):
        wanted = dict(everything_asked_for())
        deadline = time.monotonic() + WITHIN
        while wanted:
            assert time.monotonic() < deadline, "\n".join(f"{name}: {query}" for name, query in wanted.items())
            await house.round()
            for name, query in list(wanted.items()):
                if await prometheus.values(query):
                    del wanted[name]
        known = await prometheus.rules()
        assert len(known) == len(rules(RECORDING)) + len(rules(ALERTS))
        assert all(rule["health"] == "ok" for rule in known), known
        assert not await prometheus.values("turnback_no_such_metric"), "what is not there must not pass"


def everything_asked_for() -> Iterator[tuple[str, str]]:
    """By name: the dashboard's queries, what is recorded, and each choice of series that an alert looks at."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            query = filled_in(target["expr"])
            # A 0 in place of what is not there would hide that it is never there. Only what is counted by its state
            # may well be none at the moment.
            yield f"{panel['title']} {target['refId']}", query if "count(" in query else query.replace(ZERO, "")
    for rule in rules(RECORDING):
        yield rule["record"], rule["record"]
    for rule in rules(ALERTS):
        for number, chosen in enumerate(
            re.findall(r"(?:[a-z_]+:)?turnback_[\w:]+(?:\{[^}]*\})?|\bup\{[^}]*\}", rule["expr"])
        ):
            yield f"{rule['alert']} {number}", f"last_over_time({chosen}[1m])"


def filled_in(query: str) -> str:
    """As Grafana sends it."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query.replace('"$1"', ""), query
    return query


def rules(file: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load(file.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]

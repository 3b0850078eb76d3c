"""The rules of Prometheus, as its own tool judges them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.layout import PROJECT
from tests.debian_prometheus import programs

FOLDER = PROJECT / "deploy/prometheus"
RECORDING, ALERTS = FOLDER / "recording.yml", FOLDER / "alerts.yml"


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


def rules(file: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load(file.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]

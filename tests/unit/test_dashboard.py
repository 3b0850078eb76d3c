"""The dashboard and the rules ask for what there is, and the dashboard is legible."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml

from deploy.grafana.__main__ import FILE, text
from deploy.local.layout import PROJECT
from proxy.telemetry import Metrics

Json = dict[str, Any]

SCRAPED = {"job", "instance", "le"}
"""Labels that are there beside a metric's own."""


def dashboard() -> Json:
    read: Json = json.loads(FILE.read_text())
    return read


def panels() -> list[Json]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    """Of the dashboard, the rules and the choices at the top."""
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    for name in ("recording", "alerts"):
        for group in yaml.safe_load((PROJECT / f"deploy/prometheus/{name}.yml").read_text())["groups"]:
            yield from (rule["expr"] for rule in group["rules"])
    for variable in dashboard()["templating"]["list"]:
        yield from re.findall(r"label_values\((\w+(?:\{.*\})?),", variable["query"])


def labels_of_metrics() -> dict[str, set[str]]:
    """By a sample's name."""
    found: dict[str, set[str]] = {}
    for collector in vars(Metrics()).values():
        if hasattr(collector, "_name"):
            labels = set(collector._labelnames)
            endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(collector._type, [""])
            found |= {collector._name + ending: labels for ending in endings}
    return found


def test_the_file_is_what_the_modules_say() -> None:
    assert FILE.read_text() == text(), "python -m deploy.grafana"


def test_metrics_and_their_labels_are_those_there_are() -> None:
    known = labels_of_metrics()
    asked = 0
    for query in queries():
        for name, choice in re.findall(r"(?<![\w:])(turnback_\w+)(?![\w:])(?:\{([^}]*)\})?", query):
            assert name in known, (name, query)
            assert set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', choice)) <= known[name] | SCRAPED, (name, choice)
            asked += 1
        for labels, name in re.findall(r"by \(([^)]*)\) *\((?:\w+\()?(turnback_\w+)\b(?!:)", query):
            assert set(labels.split(", ")) <= known[name] | SCRAPED, (labels, name)
    assert asked > 100


def test_every_metric_is_shown() -> None:
    shown = {
        name
        for panel in panels()
        for target in panel["targets"]
        for name in re.findall(r"\bturnback_\w+", target["expr"])
    }
    for name in labels_of_metrics():
        assert any(name.startswith(re.sub("_(bucket|sum|count)$", "", other)) for other in shown), name


def test_series_are_told_apart_by_labels_that_the_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = {label for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, target


def test_every_query_looks_only_at_the_routers_that_were_picked() -> None:
    for panel in panels():
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            for name, choice in re.findall(r"\b(turnback_\w+)(\{[^}]*\})?", target["expr"]):
                assert choice.startswith('{job=~"$job",instance=~"$instance"'), name


def test_every_panel_says_how_to_read_it_and_has_a_unit() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Does reuse pay here?", "Latency", "Memory held", "Trouble"]
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]


def test_no_panel_covers_another() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        ), (one, other)


@pytest.mark.parametrize(("context", "upto"), [("<=1k", "1"), ("1k-2k", "2"), ("64k-128k", "128"), (">128k", "128")])
def test_contexts_are_put_in_order(context: str, upto: str) -> None:
    """As Prometheus does it: a pattern has to match all of the label. The second is for those above the last bound."""
    by_context = next(panel for panel in panels() if panel["type"] == "barchart")
    first, last = re.findall(r'"upto", "([^"]*)", "context", "([^"]*)"', by_context["targets"][0]["expr"])
    found = re.fullmatch(first[1], context)
    assert found is not None
    assert found[1] == upto
    assert (re.fullmatch(last[1], context) is not None) is context.startswith(">")

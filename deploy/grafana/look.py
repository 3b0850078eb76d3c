"""Colours and shapes that several rows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.grafana.board import Json, Panel, Query
from deploy.grafana.promql import in_order, or_zero, rate

OUTCOMES = {
    "hit": "green",
    "partial": "light-green",
    "first": "blue",
    "none": "#8e8e8e",
    "diverged": "orange",
    "expired": "yellow",
    "stale": "purple",
    "failed": "red",
    "unsupported": "#b877d9",
    "off": "#c8c8c8",
}
FATES = {"reused": "green", "recomputed": "orange", "new": "blue", "unknown": "#8e8e8e"}
STACKED = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60, "lineWidth": 0}
BARS = {"drawStyle": "bars", "fillOpacity": 60, "lineWidth": 0}
LOG = {"scaleDistribution": {"type": "log", "log": 10}, "axisSoftMin": None}
FULL = {"min": 0, "max": 1}


def coloured(colours: Mapping[str, str]) -> list[Json]:
    """Overrides that give each series its colour, the same in all panels."""
    return [
        {"matcher": {"id": "byName", "options": name}, "properties": [
            {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}
        ]}
        for name, colour in colours.items()
    ]  # fmt: skip


def bound(name: str) -> Json:
    """Override by which a series is seen to be a setting: dashed and red."""
    return {"matcher": {"id": "byName", "options": name}, "properties": [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
        {"id": "custom.fillOpacity", "value": 0},
    ]}  # fmt: skip


def stat(title: str, description: str, unit: str, expr: str, bad_from: float | None = None, width: int = 4) -> Panel:
    """One number of the whole time shown; red from ``bad_from`` on."""
    steps: list[Json] = [{"color": "text" if bad_from is None else "green", "value": None}]
    if bad_from is not None:
        steps.append({"color": "red", "value": bad_from})
    defaults = {"thresholds": {"mode": "absolute", "steps": steps}}
    return Panel(title, description, unit, (Query(expr, at_once=True),), "stat", width, 4, defaults=defaults)


def counted(title: str, description: str, metric: str, by: str, where: str = "", width: int = 8) -> Panel:
    """A counter's rate in parts, and all of it, which is 0 where nothing has happened yet."""
    legend = " · ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    queries = (Query(rate(metric, by, where), legend), Query(or_zero(rate(metric, where=where)), "all"))
    return Panel(title, description, "ops", queries, width=width)


def by_context(
    title: str, description: str, columns: Sequence[tuple[str, str, str]], kind: str = "table", width: int = 12
) -> Panel:
    """A row, or a group of bars, for each context length, in order. ``columns``: name, unit, expression by context."""
    names = {
        f"Value #{chr(ord('A') + at)}" if len(columns) > 1 else "Value": name for at, (name, _, _) in enumerate(columns)
    }
    places = {name: at for at, name in enumerate(["context", *names])}
    return Panel(
        title,
        description,
        columns[0][1],
        tuple(Query(in_order(expr), at_once=True) for _, _, expr in columns),
        kind,
        width,
        9,
        overrides=[
            {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
            for name, unit, _ in columns
        ],
        options={"xField": "Context"} if kind == "barchart" else {},
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "convertFieldType", "options": {
                "fields": {}, "conversions": [{"targetField": "upto", "destinationType": "number"}]
            }},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "upto", "desc": False}]}},
            {"id": "organize", "options": {
                "excludeByName": {"Time": True, "upto": True},
                "renameByName": {"context": "Context", **names},
                "indexByName": places,
            }},
        ],
    )  # fmt: skip

"""Rows of panels as the JSON that Grafana imports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

COLUMNS = 24
"""Of Grafana's grid."""
_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """PromQL, and what its series are called. ``at_once``: one value for the whole time shown, not a curve."""

    expr: str
    legend: str = ""
    at_once: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel. ``description`` says how to read it; ``unit`` is one of Grafana's."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    custom: Mapping[str, Any] = field(default_factory=dict)
    """How its kind draws a field; None leaves a usual setting out."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of all fields: bounds, thresholds, mappings."""
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()


@dataclass(frozen=True)
class Row:
    """Panels under a heading, from left to right, then below."""

    title: str
    panels: tuple[Panel, ...]


_LINES: Json = {
    "drawStyle": "line",
    "lineWidth": 1,
    "fillOpacity": 8,
    "showPoints": "auto",
    "spanNulls": False,
    "axisSoftMin": 0,
}
_LIST: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_OPTIONS: Mapping[str, Json] = {
    "timeseries": {"legend": _LIST, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "center",
        "textMode": "auto",
    },
    "bargauge": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal",
        "displayMode": "basic",
        "showUnfilled": True,
    },
    "barchart": {
        "orientation": "vertical",
        "showValue": "auto",
        "stacking": "none",
        "legend": _LIST,
        "groupWidth": 0.7,
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
    "state-timeline": {"showValue": "never", "mergeValues": True, "rowHeight": 0.8, "legend": _LIST},
}


def dashboard(title: str, uid: str, description: str, variables: Iterable[Json], rows: Iterable[Row]) -> Json:
    """The whole of it."""
    panels: list[Json] = []
    top = 0
    for row in rows:
        panels.append(
            _placed({"type": "row", "title": row.title, "collapsed": False, "panels": []}, 0, top, COLUMNS, 1)
        )
        top += 1
        left = tallest = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            panels.append(_placed(_panel(panel), left, top, panel.width, panel.height))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    for number, shown in enumerate(panels, 1):
        shown["id"] = number
    return {
        "title": title,
        "uid": uid,
        "description": description,
        "tags": ["turnback", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "links": [],
        "annotations": {"list": []},
        "templating": {"list": list(variables)},
        "panels": panels,
    }


def _placed(panel: Json, left: int, top: int, width: int, height: int) -> Json:
    return panel | {"gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _panel(panel: Panel) -> Json:
    custom = (_LINES if panel.kind == "timeseries" else {}) | dict(panel.custom)
    custom = {name: value for name, value in custom.items() if value is not None}
    defaults = {"unit": panel.unit, "custom": custom, **panel.defaults}
    if "thresholds" not in defaults:
        # Grafana's own would colour everything above 80 red.
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": "text", "value": None}]}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "targets": [_target(query, chr(ord("A") + at), panel.kind) for at, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": list(panel.overrides)},
        "options": _OPTIONS[panel.kind] | dict(panel.options),
        "transformations": list(panel.transformations),
    }


def _target(query: Query, ref: str, kind: str) -> Json:
    return {
        "refId": ref,
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": not query.at_once,
        "instant": query.at_once,
        "format": "table" if kind in ("table", "barchart") else "time_series",
    }


def variable(name: str, kind: str, label: str, query: str, **more: Any) -> Json:
    """A choice at the top of the dashboard."""
    return {"name": name, "type": kind, "label": label, "query": query, "hide": 0, "skipUrlSync": False, **more}


def labels(name: str, label: str, query: str) -> Json:
    """A choice of one, several or all values of a label."""
    return variable(
        name,
        "query",
        label,
        query,
        datasource=_SOURCE,
        definition=query,
        refresh=2,
        sort=1,
        multi=True,
        includeAll=True,
        allValue=".*",
        current={"text": ["All"], "value": ["$__all"]},
        options=[],
        regex="",
    )

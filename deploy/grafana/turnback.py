"""The dashboard."""

from __future__ import annotations

from deploy.grafana import latency, memory, pays, trouble
from deploy.grafana.board import Json, dashboard, labels, variable


def turnback() -> Json:
    """As Grafana imports it."""
    return dashboard(
        "Turnback",
        "turnback",
        "Whether reuse pays, how long turns take, what decode holds for the next turns, and what is wrong.",
        (
            variable("datasource", "datasource", "Prometheus", "prometheus", current={}, regex="", refresh=1),
            labels("job", "Job", "label_values(turnback_build_info, job)"),
            labels("instance", "Router", 'label_values(turnback_build_info{job=~"$job"}, instance)'),
        ),
        (pays.ROW, latency.ROW, memory.ROW, trouble.ROW),
    )

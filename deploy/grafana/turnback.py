"""The dashboard."""

from __future__ import annotations

from deploy.grafana import latency, memory, pays, trouble
from deploy.grafana.board import Json, dashboard, labels, variable

_TTLS = ("10", "20", "30", "60", "120", "240", "480", "900", "1800", "3600")


def turnback() -> Json:
    """As Grafana imports it."""
    ttl = {"text": "480", "value": "480", "selected": True}
    return dashboard(
        "Turnback",
        "turnback",
        "Whether reuse pays, how long turns take, what decode holds for the next turns, and what is wrong.",
        (
            variable("datasource", "datasource", "Prometheus", "prometheus", current={}, regex="", refresh=1),
            labels("job", "Job", "label_values(turnback_build_info, job)"),
            labels("instance", "Router", 'label_values(turnback_build_info{job=~"$job"}, instance)'),
            variable(
                "ttl",
                "custom",
                "TTL, s",
                ",".join(_TTLS),
                description="What decoder_kv_blocks_ttl is set to: only a line in two panels.",
                current=ttl,
                options=[{"text": seconds, "value": seconds, "selected": seconds == ttl["value"]} for seconds in _TTLS],
            ),
        ),
        (pays.ROW, latency.ROW, memory.ROW, trouble.ROW),
    )

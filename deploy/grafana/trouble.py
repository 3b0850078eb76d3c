"""The row to look at first when something is wrong."""

from __future__ import annotations

from deploy.grafana.board import Json, Panel, Query, Row
from deploy.grafana.look import BARS, counted, stat
from deploy.grafana.promql import increase, or_zero, picked

_WORKER = "role, worker"
_NAME = "{{role}} · {{worker}}"
# The worst that any router sees.
_UP = f"min by ({_WORKER}) ({picked('turnback_worker_up')})"
_OPEN = f"max by ({_WORKER}) ({picked('turnback_worker_breaker_open')})"
_DRAINING = f"max by ({_WORKER}) ({picked('turnback_worker_draining')})"


def _states(*states: tuple[str, str, str]) -> dict[str, list[Json]]:
    """Value, text and colour of each state."""
    options = {value: {"text": text, "color": colour, "index": at} for at, (value, text, colour) in enumerate(states)}
    return {"mappings": [{"type": "value", "options": options}]}


def _restarts(window: str) -> str:
    return f"max by ({_WORKER}) (changes({picked('turnback_worker_start_time_seconds')}[{window}]))"


ROW = Row(
    "Trouble",
    (
        stat(
            "Routers",
            "That answer Prometheus now.",
            "short",
            or_zero(f"count(count by (job, instance) ({picked('turnback_build_info')}))"),
            width=3,
        ),
        stat(
            "Workers down",
            "Now, as the router sees it that sees the least.",
            "short",
            or_zero(f"count({_UP} == 0)"),
            1,
            3,
        ),
        stat(
            "Breakers open",
            "Workers that are sent nothing since they kept failing turns. They are tried again by themselves.",
            "short",
            or_zero(f"count({_OPEN} == 1)"),
            1,
            3,
        ),
        stat(
            "Worker restarts",
            "In the time shown. All that a worker held is gone with a restart.",
            "short",
            or_zero(f"sum({_restarts('$__range')})"),
            1,
            3,
        ),
        stat("Fallbacks", "In the time shown.", "short", or_zero(increase("turnback_fallbacks_total")), width=3),
        stat("Legs sent again", "In the time shown.", "short", or_zero(increase("turnback_retries_total")), width=3),
        stat(
            "Store failures",
            "In the time shown. Their turns were served without reuse.",
            "short",
            or_zero(increase("turnback_store_failures_total")),
            1,
            3,
        ),
        stat(
            "Turns refused",
            "In the time shown: their clients got 429, or 503 from a router that was about to end.",
            "short",
            or_zero(increase("turnback_turns_refused_total")),
            1,
            3,
        ),
        Panel(
            "Workers up",
            "By their health probes, as the router sees it that sees the least.",
            "short",
            (Query(_UP, _NAME),),
            kind="state-timeline",
            width=12,
            defaults=_states(("0", "down", "red"), ("1", "up", "green")),
        ),
        Panel(
            "Workers that get no turns",
            "1: drained by the operator. 2: the breaker is open, since it kept failing. 3: both.",
            "short",
            (Query(f"{_DRAINING} + 2 * {_OPEN}", _NAME),),
            kind="state-timeline",
            width=12,
            defaults=_states(
                ("0", "in use", "green"), ("1", "draining", "blue"), ("2", "breaker open", "red"), ("3", "both", "red")
            ),
        ),
        counted(
            "Fallbacks by reason",
            "Steps down from what was tried first; the turns were served. The README explains each reason. A few are "
            "harmless; many cost more than reuse saves.",
            "turnback_fallbacks_total",
            "reason",
        ),
        counted(
            "Legs sent again",
            "To another worker or the same, by role: what failed was tried again.",
            "turnback_retries_total",
            "role",
        ),
        counted(
            "Store failures",
            "Calls that failed, or were not made since the store had just failed. The log says why.",
            "turnback_store_failures_total",
            "call",
        ),
        counted(
            "Turns refused",
            "`full`: no room in the queue. `late`: waited too long. `draining`: the router was told to end.",
            "turnback_turns_refused_total",
            "reason",
        ),
        counted(
            "Answers without KV parameters",
            "Decode did not say what it holds, so the next turn reuses nothing. All streams: vLLM before 0.33 without "
            "the plugin. All whole answers: decode without bidirectional_kv_xfer.",
            "turnback_answers_without_params_total",
            "worker, mode",
        ),
        Panel(
            "Worker restarts",
            "Changes of the time at which a worker says it was started.",
            "short",
            (Query(_restarts("$__rate_interval"), _NAME),),
            custom=BARS,
        ),
        Panel(
            "Workers started",
            "How long ago, as each says.",
            "dateTimeFromNow",
            (
                Query(
                    f"1000 * max by ({_WORKER}) ({picked('turnback_worker_start_time_seconds')})", _NAME, at_once=True
                ),
            ),
            kind="stat",
            width=12,
            height=6,
            options={"textMode": "value_and_name", "colorMode": "none", "orientation": "auto"},
        ),
        Panel(
            "Legs in flight",
            "On each worker, of all routers that were picked. Uneven lines: conversations stick to their worker, or "
            "one is slow.",
            "short",
            (Query(f"sum by ({_WORKER}) ({picked('turnback_worker_in_flight')})", _NAME),),
            width=12,
            height=6,
        ),
    ),
)

"""The row on what decode holds."""

from __future__ import annotations

from deploy.grafana.board import Panel, Query, Row
from deploy.grafana.look import FULL, bound, counted
from deploy.grafana.promql import largest, share, smallest

# Every router, and each of its processes, tells what all of them retain: the largest, not the sum.
_ENTRIES = largest("turnback_retained_entries", "worker")
_TOKENS = largest("turnback_retained_tokens", "worker")
_SHARE = largest("turnback_retained_share", "worker")
_USAGE = largest("turnback_worker_kv_usage", "role, worker")
_CAPACITY = largest("turnback_worker_kv_capacity_tokens", "role, worker")

ROW = Row(
    "Memory held",
    (
        Panel(
            "Conversations retained",
            "On each decode worker. With memory:// every router knows its own only: then this is the largest of them.",
            "short",
            (Query(_ENTRIES, "{{worker}}"),),
        ),
        Panel("Tokens retained", "On each decode worker.", "short", (Query(_TOKENS, "{{worker}}"),)),
        Panel(
            "Tokens for each conversation",
            "Retained tokens over retained conversations. Times the conversations that pause at once, that is the "
            "memory that reuse needs.",
            "short",
            (Query(share(_TOKENS, _ENTRIES), "{{worker}}"),),
        ),
        Panel(
            "Share of the KV cache retained",
            "The setting retained_share bounds it: the dashed line, the smallest that a router has. A line that lies "
            "at the bound means that the oldest conversations are being given up.",
            "percentunit",
            (Query(_SHARE, "{{worker}}"), Query(smallest("turnback_retained_share_bound"), "bound")),
            defaults=FULL,
            overrides=[bound("bound")],
        ),
        Panel(
            "KV cache in use",
            "As each worker says, retained blocks included. Near 100 % new turns wait for room. What decode uses "
            "beyond its retained share is running turns.",
            "percentunit",
            (Query(_USAGE, "{{role}} · {{worker}}"),),
            defaults=FULL,
        ),
        Panel(
            "Size of the KV cache",
            "Tokens that each worker has room for, as it says.",
            "short",
            (Query(_CAPACITY, "{{role}} · {{worker}}", at_once=True),),
            kind="bargauge",
        ),
        counted(
            "Releases by reason",
            "Blocks given back before their time. `displaced`, `diverged`, `deleted` and so on cost nothing. "
            "`pressure` and `budget`: for lack of room, and the next turn computes everything again.",
            "turnback_releases_total",
            "reason",
            width=12,
        ),
        counted(
            "Releases that came to nothing",
            "`failed` or `left`: the blocks stay until the TTL. Harmless if few. Many: no prefill worker is up, or "
            "the side channel between the workers does not work.",
            "turnback_releases_total",
            "reason, result",
            'result!="released"',
            width=12,
        ),
    ),
)

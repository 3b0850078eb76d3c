"""The row on how long everything takes."""

from __future__ import annotations

from deploy.grafana.board import Panel, Query, Row
from deploy.grafana.look import coloured
from deploy.grafana.promql import or_zero, picked, quantile, quantiles, rate

_LEG = "turnback_prefill_seconds"
_STORE = "turnback_store_seconds"

ROW = Row(
    "Latency",
    (
        Panel(
            "Time to the first token",
            "Of streams, from the request's arrival, waiting included. The parts of it are in the panels below.",
            "s",
            quantiles("turnback_ttft_seconds"),
        ),
        Panel(
            "Time to the first token, P95 by outcome",
            "`hit` and `partial` should lie below `first` of like context. `failed` has a lost try in it.",
            "s",
            (Query(quantile(0.95, "turnback_ttft_seconds", "outcome"), "{{outcome}}"),),
        ),
        Panel(
            "Time per output token",
            "After the first, of streams with a conversation id. It is decode's; reuse should leave it as it is. If "
            "it grows with the retained share, decode lacks room.",
            "s",
            quantiles("turnback_tpot_seconds"),
        ),
        Panel(
            "Whole turn",
            "From the request's arrival to the end of the answer.",
            "s",
            quantiles("turnback_turn_seconds"),
        ),
        Panel(
            "Prefill leg",
            "One leg to a prefill worker, with and without reuse. Not of like context: for that see the first row.",
            "s",
            tuple(
                Query(quantile(of, _LEG, where=f'reused="{reused}"'), f"P{of * 100:.0f}, {name}")
                for reused, name in (("yes", "reusing"), ("no", "plain"))
                for of in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            "Decode: sent to first token",
            "Reading prefill's blocks, waiting for room, and the first step. If it is long while prefill is not, "
            "decode is full, or the transfer slow.",
            "s",
            quantiles("turnback_decode_first_token_seconds"),
        ),
        Panel(
            "Render",
            "Asking for a prompt's token ids, only where there is something to compare with: what verifying costs.",
            "s",
            quantiles("turnback_render_seconds"),
        ),
        Panel(
            "Store",
            "One call. Twice a turn this is added; milliseconds say that Redis is far away or busy.",
            "s",
            (
                Query(quantile(0.95, _STORE, "call"), "P95 {{call}}"),
                Query(quantile(0.5, _STORE), "P50"),
                Query(quantile(0.99, _STORE), "P99"),
            ),
        ),
        Panel(
            "Queue",
            "Of turns that had to wait for a place. No line: none had to.",
            "s",
            quantiles("turnback_queue_seconds"),
        ),
        Panel(
            "Turns",
            "Running and waiting ones, in all routers that were picked.",
            "short",
            (
                Query(f"sum({picked('turnback_turns_running')})", "running"),
                Query(f"sum({picked('turnback_turns_queued')})", "queued"),
            ),
            overrides=coloured({"queued": "orange"}),
        ),
        Panel(
            "Turns begun, by endpoint",
            "How much traffic all of this is about.",
            "reqps",
            (Query(rate("turnback_turns_total", "endpoint"), "{{endpoint}}"),),
        ),
        Panel(
            "Tokens",
            "Output tokens, of turns with a conversation id, and prompt tokens as prefill had to compute them.",
            "short",
            (
                Query(or_zero(rate("turnback_output_tokens_total")), "output"),
                Query(or_zero(rate("turnback_prompt_tokens_total", where='fate!="reused"')), "prompt, computed"),
                Query(or_zero(rate("turnback_prompt_tokens_total", where='fate="reused"')), "prompt, reused"),
            ),
        ),
    ),
)

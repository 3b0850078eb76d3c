"""The row that answers: does reuse pay here?"""

from __future__ import annotations

from deploy.grafana.board import Panel, Query, Row
from deploy.grafana.look import FATES, FULL, LOG, OUTCOMES, STACKED, bound, by_context, coloured, stat
from deploy.grafana.promql import CURVE, WHOLE, increase, largest, mean, quantile, rate, saved, share, shares, smallest

_TURNS = "turnback_turns_total"
_TOKENS = "turnback_prompt_tokens_total"
_LEG_TOKENS = "turnback_prefill_tokens_total"
_LEGS = "turnback_prefill_seconds_count"
_REUSED = 'outcome=~"hit|partial"'
_ASKED = 'outcome!~"none|off"'
_AGAIN = 'fate=~"reused|recomputed"'
_PLAIN, _REUSING = 'reused="no"', 'reused="yes"'
_TTFT = "turnback_context_ttft_seconds"
_LEG = "turnback_prefill_seconds"
_PAUSE = "turnback_pause_seconds"
_TTL = Query(largest("turnback_decoder_kv_blocks_ttl_seconds"), "TTL")
# Bounds of the histogram's buckets, so that the shares are exact.
_TTLS = (10, 30, 60, 120, 240, 480, 900, 1800)
_SET = {"instance": "Router", "Value #A": "TTL, s", "Value #B": "threshold, tokens", "Value #C": "retained share"}
_ORGANIZED = {
    "excludeByName": {"Time": True},
    "renameByName": _SET,
    "indexByName": {name: at for at, name in enumerate(_SET)},
}


def _ttft(of: float, where: str) -> str:
    return quantile(of, _TTFT, "context", where, WHOLE)


def _per_leg(kind: str, where: str) -> str:
    tokens = increase(_LEG_TOKENS, "context", f'{where},kind="{kind}"')
    return share(tokens, increase(_LEGS, "context", where))


ROW = Row(
    "Does reuse pay here?",
    (
        stat(
            "Turns that reused",
            "Of the turns that named a conversation while reuse was on, in the time shown. First turns count, so it "
            "cannot reach 100 %: conversations of five turns end at 80 %.",
            "percentunit",
            share(increase(_TURNS, where=_REUSED), increase(_TURNS, where=_ASKED)),
        ),
        stat(
            "Repeated tokens reused",
            "The hit rate: of the prompt tokens that an earlier turn had computed, the share that prefill did not "
            "compute again. 90 % and more is usual where it works; if low, see why below. Turns that were served "
            "without reuse on purpose, to compare, count as well.",
            "percentunit",
            share(increase(_TOKENS, where='fate="reused"'), increase(_TOKENS, where=_AGAIN)),
        ),
        stat(
            "Prompt tokens not computed",
            "Reused tokens as a share of all prompt tokens, those of turns without a conversation included: how much "
            "of prefill's work reuse takes away.",
            "percentunit",
            share(increase(_TOKENS, where='fate="reused"'), increase(_TOKENS)),
        ),
        stat(
            "Prefill time saved",
            "Estimate: what a plain prefill leg of like context takes on average in the time shown, less what one that "
            "reuses takes, for each leg that reused. Below 0 reuse costs more than it saves. Contexts that had "
            "no plain leg are left out. A plain leg that finds much in prefill's own prefix cache is short, and "
            "counts as such.",
            "s",
            saved(),
        ),
        stat(
            "Saved, of all prefill time",
            "The same, as a share of what prefill would have taken without reuse. Below a few percent reuse does not "
            "pay, and decode's memory is better left to running turns.",
            "percentunit",
            f"{saved()} / ({saved()} + {increase(f'{_LEG}_sum')})",
        ),
        stat(
            "Saved for each reuse",
            "The same, for a turn that reused: by so much its first token came earlier.",
            "s",
            share(saved(), increase(_LEGS, where=_REUSING)),
        ),
        by_context(
            "TTFT by context: P50 without and with reuse",
            "The time to the first token of streams, by the length of the prompt (k = 1,024 tokens), in the time "
            "shown. Reuse pays where its bar is clearly the shorter one, usually the more the longer the context. "
            "Short contexts may show none. A group without a second bar had no such turn: compare with reuse off for a "
            "while (`turnback bench`).",
            (("without reuse", "s", _ttft(0.5, _PLAIN)), ("with reuse", "s", _ttft(0.5, _REUSING))),
            "barchart",
        ),
        by_context(
            "TTFT by context",
            "The same in numbers, with the P95. Few streams make a quantile of little worth: look at their number "
            "first.",
            (
                ("streams without", "short", increase(f"{_TTFT}_count", "context", _PLAIN)),
                ("with", "short", increase(f"{_TTFT}_count", "context", _REUSING)),
                ("P50 without", "s", _ttft(0.5, _PLAIN)),
                ("P50 with", "s", _ttft(0.5, _REUSING)),
                ("P95 without", "s", _ttft(0.95, _PLAIN)),
                ("P95 with", "s", _ttft(0.95, _REUSING)),
            ),
        ),
        by_context(
            "Transfer against local prefill: the prefill leg by context",
            "What a plain leg costs, and one that copies blocks back from decode and computes the rest. Where `mean "
            "with` is not below `mean without`, copying is no faster than computing: raise "
            "kv_recompute_threshold above that many tokens.",
            (
                ("legs without", "short", increase(_LEGS, "context", _PLAIN)),
                ("with", "short", increase(_LEGS, "context", _REUSING)),
                ("mean without", "s", mean(_LEG, "context", _PLAIN, WHOLE)),
                ("mean with", "s", mean(_LEG, "context", _REUSING, WHOLE)),
                ("computed without", "short", _per_leg("computed", _PLAIN)),
                ("computed with", "short", _per_leg("computed", _REUSING)),
                ("copied with", "short", _per_leg("copied", _REUSING)),
            ),
        ),
        Panel(
            "Prefill seconds saved each second",
            "The estimate above over time, by context. 1 means: so much less work as one prefill worker does.",
            "short",
            (Query(saved("context", CURVE, "rate"), "{{context}}"),),
            width=12,
            height=9,
            custom=STACKED,
        ),
        Panel(
            "TTFT P50 by context, without reuse",
            "Beside the next panel, line by line. Without reuse it grows with the context.",
            "s",
            (Query(quantile(0.5, _TTFT, "context", _PLAIN), "{{context}}"),),
            width=12,
        ),
        Panel(
            "TTFT P50 by context, with reuse",
            "With reuse the lines lie close together and low, since only what is new is computed.",
            "s",
            (Query(quantile(0.5, _TTFT, "context", _REUSING), "{{context}}"),),
            width=12,
        ),
        Panel(
            "Prompt tokens by fate",
            "`recomputed`: an earlier turn of the conversation had computed them, and they were computed again: what "
            "reuse could still save. `new`: nobody had. `unknown`: no conversation id, so nobody can tell.",
            "percentunit",
            (Query(shares(_TOKENS, "fate"), "{{fate}}"),),
            custom=STACKED,
            defaults=FULL,
            overrides=coloured(FATES),
        ),
        Panel(
            "Outcomes of turns",
            "Green is reuse. The README explains each. Many `expired`: pauses are longer than the TTL. Many "
            "`diverged`: clients rewrite their history. Many `none`: clients name no conversation.",
            "percentunit",
            (Query(shares(_TURNS, "outcome"), "{{outcome}}"),),
            custom=STACKED,
            defaults=FULL,
            overrides=coloured(OUTCOMES),
        ),
        Panel(
            "Hit rate",
            "Turns: those that reused, of those that named a conversation. Tokens: reused, of those that an earlier "
            "turn had computed; this line does not move with the number of first turns.",
            "percentunit",
            (
                Query(share(rate(_TURNS, where=_REUSED), rate(_TURNS, where=_ASKED)), "turns"),
                Query(share(rate(_TOKENS, where='fate="reused"'), rate(_TOKENS, where=_AGAIN)), "tokens"),
            ),
            defaults=FULL,
        ),
        Panel(
            "Why turns reused nothing",
            "The reason, as in x-turnback-reason. `nothing_retained` is usual for first turns. What else is high "
            "here says where to look; the README has a line for each.",
            "ops",
            (Query(rate(_TURNS, "outcome, reason", 'outcome!~"hit|partial"'), "{{outcome}} · {{reason}}"),),
            custom=STACKED,
        ),
        Panel(
            "Pause between turns",
            "From the end of an answer to the conversation's next request, up to an hour. Turns above the TTL (the "
            "setting decoder_kv_blocks_ttl; dashed) come too late. If even the P95 is far below, a shorter TTL would "
            "free decode's memory sooner.",
            "s",
            (
                Query(quantile(0.5, _PAUSE), "P50"),
                Query(quantile(0.9, _PAUSE), "P90"),
                Query(quantile(0.95, _PAUSE), "P95"),
                _TTL,
            ),
            custom=LOG,
            overrides=[bound("TTL")],
        ),
        Panel(
            "Pauses that a TTL would bridge",
            "The share of next turns that came within so many seconds, in the time shown: what decoder_kv_blocks_ttl "
            "of that size can keep at best. Take the one after which little is gained. Conversations that never went "
            "on are not in here; they hold memory for all of the TTL.",
            "percentunit",
            tuple(
                Query(
                    share(increase(f"{_PAUSE}_bucket", where=f'le=~"{ttl}([.]0)?"'), increase(f"{_PAUSE}_count")),
                    f"{ttl} s",
                    at_once=True,
                )
                for ttl in _TTLS
            ),
            kind="bargauge",
            defaults=FULL,
        ),
        Panel(
            "Age of entries when they are reused",
            "How long blocks had been held when the next turn read them. idle_release a little above the P95 gives "
            "memory back that is hardly ever used again.",
            "s",
            (
                Query(quantile(0.5, "turnback_reuse_age_seconds"), "P50"),
                Query(quantile(0.95, "turnback_reuse_age_seconds"), "P95"),
                Query(quantile(0.99, "turnback_reuse_age_seconds"), "P99"),
                _TTL,
            ),
            custom=LOG,
            overrides=[bound("TTL")],
        ),
        Panel(
            "What the routers are set to",
            "The settings by which these panels are read: decoder_kv_blocks_ttl, kv_recompute_threshold and "
            "retained_share. All routers should have the same; decode the same TTL, and prefill the same threshold.",
            "none",
            (
                Query(largest("turnback_decoder_kv_blocks_ttl_seconds", "instance"), at_once=True),
                Query(largest("turnback_kv_recompute_threshold_tokens", "instance"), at_once=True),
                Query(smallest("turnback_retained_share_bound", "instance"), at_once=True),
            ),
            kind="table",
            width=16,
            transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": _ORGANIZED}],
        ),
    ),
)

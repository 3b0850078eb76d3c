"""The advice for people: what to do first, then why."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bench.advise.advice import Advice
from bench.advise.evidence import Current, Evidence, Origin
from bench.advise.pays import PaysAdvice
from bench.advise.threshold import ThresholdAdvice
from bench.advise.ttl import FEW, Choice, TtlAdvice
from bench.advise.units import percent, seconds, tokens

SHOWN = (15, 30, 60, 120, 240, 480, 900, 1800, 3600)
"""TTLs that the table shows, besides those that matter."""

_WIDEST = 100

_SETTINGS = {
    "ttl": "decoder_kv_blocks_ttl",
    "threshold": "kv_recompute_threshold",
    "retained_share": "retained_share",
}
_ORIGINS: dict[Origin, str] = {
    "option": "as the options say",
    "metrics": "as the metrics say",
    "bench": "as the bench was told",
    "default": "the default, since nothing says what it is",
}

_INSTEAD = {
    "none": "Clients do not name their conversations; see Conversation ids in the README.",
    "first": "These are first turns, or decode had to give up what it held; see turnback_releases_total.",
    "diverged": "Clients send back another history than they were given.",
    "expired": "The next turn comes too late; see the TTL below.",
    "stale": "Decode workers restart, or go, before the next turn comes.",
    "failed": "Reuse is tried and goes wrong; the router's log says how.",
    "unsupported": "Most requests are of a kind that cannot reuse; see Outcomes in the README.",
}


def show(advice: Advice, evidence: Evidence, console: Console) -> None:
    """Print it all."""
    console.print(f"From {advice.source}.")
    for line in _set_now(advice.current, evidence):
        console.print(line)
    _section(console, "Does reuse pay here?", _pays(advice.pays, evidence))
    if advice.pays.verdict == "no":
        console.print("\nThe rest is for those who leave it on all the same.")
    _section(console, "decoder_kv_blocks_ttl", _ttl(advice.ttl, advice.current, evidence))
    _section(console, "kv_recompute_threshold", _threshold(advice.threshold, advice.current, evidence))


def _set_now(current: Current, evidence: Evidence) -> Iterator[str]:
    """What the advice takes for set, by who says so; and where routers do not agree."""
    parts = []
    for origin, words in _ORIGINS.items():
        names = [name for name in _SETTINGS if current.origins.get(name, "default") == origin]
        if names:
            parts.append(f"{_listed([f'{_SETTINGS[name]} {getattr(current, name):g}' for name in names])}, {words}")
    yield f"Set now: {'; '.join(parts)}."
    for name in _SETTINGS:
        values = getattr(evidence.told, name)
        if len(values) > 1 and current.origins.get(name) == "metrics":
            yield (
                f"The routers do not agree on {_SETTINGS[name]}: {_listed([f'{value:g}' for value in values])}."
                " It should be the same on all."
            )


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _section(console: Console, title: str, content: Iterable[RenderableType]) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    width = min(console.width, _WIDEST)
    for one in content:
        if isinstance(one, Table):
            console.print(Padding(one, (0, 0, 0, 2), expand=False))
        else:
            bold = isinstance(one, Text)
            text = textwrap.fill(str(one), width, initial_indent="  ", subsequent_indent="  ")
            console.print(Text(text, style="bold" if bold else ""), soft_wrap=True)


def _pays(pays: PaysAdvice, evidence: Evidence) -> Iterator[RenderableType]:
    yield Text({"yes": "Yes.", "no": "No.", "cannot tell": "Cannot tell yet."}[pays.verdict], style="bold")
    if not evidence.turns:
        yield "No turn was seen that might have reused anything."
    elif pays.reusing is not None:
        yield f"{percent(pays.reusing)} of {evidence.turns:,} turns reused something."
    if evidence.recomputed_share is not None:
        yield (
            f"{percent(evidence.recomputed_share)} of all prompt tokens were computed again though an earlier turn of"
            " the conversation had computed them: that much more could be saved at most."
        )
    if pays.why == "hardly anything is reused" and pays.instead:
        outcome, reason = pays.instead
        yield f"That is too little to pay. Most others are `{outcome}` ({reason}). {_INSTEAD.get(outcome, '')}".rstrip()
    if pays.gain is not None and pays.low is not None and pays.high is not None and pays.share is not None:
        yield _gain(pays, evidence)
    match pays.verdict, pays.why:
        case "no", "measured":
            yield (
                "Turn it off: --no-reuse on the router, and bidirectional_kv_xfer away on the workers gives"
                " decode its memory back."
            )
        case "cannot tell", "nothing to compare with":
            yield (
                "There are not enough turns of like length with and without reuse to compare. Run `turnback bench`, or"
                " send some turns with the header X-Turnback-Reuse: off and the admin key."
            )
        case "cannot tell", _:
            yield f"It needs about {pays.more_turns or 0:,} more turns with reuse, of like lengths, to tell."
    if pays.rows:
        yield _contexts(pays)
    if evidence.kind == "router" and pays.rows:
        yield (
            "Turns are compared within their class of context, but they are not the same turns: those without reuse are"
            " mostly first ones. An A/B run of `turnback bench` is better evidence."
        )


def _gain(pays: PaysAdvice, evidence: Evidence) -> str:
    assert pays.gain is not None
    assert pays.low is not None
    assert pays.high is not None
    assert pays.share is not None
    way = "sooner" if pays.gain >= 0 else "later"
    what = "later turns, each served both ways" if evidence.kind == "bench" else "turns that reused"
    return (
        f"The first token comes {seconds(abs(pays.gain))} {way} ({_between(pays.low, pays.high)}), which is"
        f" {percent(abs(pays.share))} of the time without reuse: mean of {pays.compared:,} {what}."
    )


def _between(low: float, high: float) -> str:
    """An interval of gains, which may be losses."""
    if low < 0 < high:
        return f"between {seconds(-low)} later and {seconds(high)} sooner"
    low, high = sorted((abs(low), abs(high)))
    return f"{seconds(low)} to {seconds(high)}"


def _contexts(pays: PaysAdvice) -> Table:
    made = Table("context", "turns", "first token, off → on", "ratio", box=box.MARKDOWN)
    for row in pays.rows:
        turns = f"{row.turns_on:,}" if row.turns_on == row.turns_off else f"{row.turns_off:,} / {row.turns_on:,}"
        made.add_row(
            row.context,
            turns,
            f"{seconds(row.off)} → {seconds(row.on)}",
            f"{row.off / row.on:.1f}" if row.on else "",
        )
    return made


def _ttl(ttl: TtlAdvice, current: Current, evidence: Evidence) -> Iterator[RenderableType]:
    if ttl.recommended is None:
        yield Text("Cannot tell yet." if ttl.returns < FEW else "No TTL helps.", style="bold")
        if ttl.returns < FEW:
            yield f"Of {ttl.returns} returns the pause is known; {FEW} are needed."
        else:
            yield "All pauses are longer than an hour."
        return
    chosen = next(choice for choice in ttl.choices if choice.ttl == ttl.recommended)
    number = f"{ttl.recommended:.0f}"
    if ttl.recommended == current.ttl:
        yield Text(f"Leave it at {number}.", style="bold")
    else:
        yield Text(f"Set {number}, on decode and on the router.", style="bold")
    yield (
        f"{percent(chosen.kept)} of the returns come in time then ({percent(ttl.kept_low)} to {percent(ttl.kept_high)};"
        f" {ttl.returns:,} were seen). {_compared(chosen, ttl)}".rstrip()
    )
    yield _memory(chosen, ttl)
    if chosen.tokens is not None and evidence.turns_per_second is None:
        yield "That is reckoned from what decode holds at this moment. --turns-per-second makes it surer."
    if ttl.best_without_bound is not None and ttl.best_without_bound > ttl.recommended:
        best = next(choice for choice in ttl.choices if choice.ttl == ttl.best_without_bound)
        yield (
            f"{best.ttl:.0f} s would keep {percent(best.kept)}, but {_of_cache(best)} would be held on average;"
            f" retained_share allows {percent(ttl.bound)}."
        )
    yield _ttls(ttl)
    beyond = f", {percent(ttl.unknown)} of them longer than that" if ttl.unknown else ""
    yield (
        f"The longest pause that is known is {seconds(ttl.longest_pause)}{beyond}. Who would have come back later than"
        " what was looked at is not in these numbers. An entry is given up"
        f" {current.margin:.0f} s before the TTL is over; that is allowed for."
    )
    if evidence.kind == "bench":
        yield "The pauses are those of the bench's workload: this holds for your users only if that is like them."


def _compared(chosen: Choice, ttl: TtlAdvice) -> str:
    if chosen.ttl == ttl.now.ttl:
        return ""
    return f"With {ttl.now.ttl:.0f} s, as is set now, {percent(ttl.now.kept)} do."


def _memory(chosen: Choice, ttl: TtlAdvice) -> str:
    gone = f" {percent(1 - ttl.returning)} of what is left for a next turn waits in vain, until the TTL is over."
    if chosen.tokens is None:
        return "What decode holds for it cannot be told: how many turns come in a second is not known." + gone
    text = f"On average decode holds {_of_cache(chosen)}, for that; at peaks more, in proportion to the turns."
    return text + gone + ("" if ttl.fits else f" Even that is more than retained_share allows ({percent(ttl.bound)}).")


def _of_cache(choice: Choice) -> str:
    held = f"{tokens(choice.tokens or 0)} tokens"
    return f"{held}, {percent(choice.share)} of its KV cache" if choice.share is not None else held


def _ttls(ttl: TtlAdvice) -> Table:
    made = Table("TTL", "returns kept", "held on average", "of the KV cache", "", box=box.MARKDOWN)
    shown = {choice.ttl: choice for choice in ttl.choices if choice.ttl in (*SHOWN, ttl.recommended)}
    shown[ttl.now.ttl] = ttl.now
    for seconds_, choice in sorted(shown.items()):
        marks = [mark for mark, ttl_ in (("advised", ttl.recommended), ("now", ttl.now.ttl)) if ttl_ == seconds_]
        made.add_row(
            f"{seconds_:.0f} s",
            percent(choice.kept),
            f"{tokens(choice.tokens)} tokens" if choice.tokens is not None else "?",
            percent(choice.share) if choice.share is not None else "?",
            ", ".join(marks),
        )
    return made


def _threshold(threshold: ThresholdAdvice, current: Current, evidence: Evidence) -> Iterator[RenderableType]:
    if threshold.speeds is None or threshold.low is None or threshold.high is None or threshold.crossing is None:
        yield Text("Cannot tell yet.", style="bold")
        yield (
            f"{threshold.prompts:,} prompts were timed. Needed are some with and some without reuse, of different"
            " lengths."
        )
        return
    yield Text(_to_do(threshold, current), style="bold")
    yield _crossing(threshold)
    about = 1024 * max(1, round(threshold.longest / 2048))
    speeds = threshold.speeds
    copying = seconds(speeds.copying(about)) if speeds.copying(about) >= 5e-5 else "no time that shows"
    if speeds.copy > 0:
        copying += f": {seconds(speeds.start)} to begin with, and {tokens(1 / speeds.copy)} tokens a second after that"
    yield f"Computing {tokens(about)} tokens takes {seconds(speeds.computing(about))}. Copying them takes {copying}."
    of = (
        "times to the first token, so that asking for token ids is in it"
        if evidence.points_are == "first tokens"
        else "prefill legs, averaged by class of context"
    )
    yield (
        f"A fit to {threshold.prompts:,} {of}. The shortest copy was of {tokens(threshold.shortest_copied)} tokens:"
        " what is said of shorter ones is extrapolated."
    )


def _to_do(threshold: ThresholdAdvice, current: Current) -> str:
    match threshold.verdict:
        case "never":
            return "No number helps: copying never pays here."
        case "cannot tell":
            return "Cannot tell yet."
    if threshold.recommended == current.threshold:
        return f"Leave it at {current.threshold}."
    return f"Set {threshold.recommended}, on prefill and on the router."


def _crossing(threshold: ThresholdAdvice) -> str:
    assert threshold.crossing is not None
    assert threshold.low is not None
    assert threshold.high is not None
    between = f"{tokens(threshold.low)} to " + ("any" if math.isinf(threshold.high) else tokens(threshold.high))
    match threshold.verdict:
        case "never":
            return (
                f"Copying takes longer than computing at every length seen, up to {tokens(threshold.longest)} tokens."
            )
        case "cannot tell":
            return (
                f"Copying may get faster than computing at {between} tokens: the measurements scatter too much, or the"
                " lengths are too much alike."
            )
        case "default" if threshold.high < 1:
            return "Copying is faster from the first token on. 64 is the engine's default; less gains nothing."
        case "default":
            return (
                f"Copying is faster from {tokens(threshold.crossing)} tokens on ({between}). 64 is the engine's"
                " default; less gains nothing."
            )
        case "keep" if threshold.crossing < 1:
            return (
                "Copying is faster from the first token on or, for all that can be told, from"
                f" {tokens(threshold.high)} tokens on at the latest. What is set lies there too."
            )
        case "keep":
            return (
                f"Copying is faster from about {tokens(threshold.crossing)} tokens on, but that is only known to lie at"
                f" {between}. What is set lies there too."
            )
    return f"Copying is faster than computing from {tokens(threshold.crossing)} tokens on ({between})."

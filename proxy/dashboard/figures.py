"""The metrics as the page wants them: sums and buckets. What is worked out of these is worked out in the browser."""

import re
from collections import defaultdict
from collections.abc import Iterable

import msgspec
from prometheus_client import Metric


class OutcomeTurns(msgspec.Struct, frozen=True):
    """How many turns had this outcome for this reason."""

    outcome: str
    reason: str
    turns: int


class PromptTokens(msgspec.Struct, frozen=True):
    """Prompt tokens by fate."""

    reused: int
    recomputed: int
    new: int
    unknown: int


class ContextTurns(msgspec.Struct, frozen=True):
    """Streams of one context length: how many fell into each bucket of ``Ttft``, with reuse and without."""

    context: str
    reused: list[int]
    plain: list[int]


class Ttft(msgspec.Struct, frozen=True):
    """Times to the first token, by context length."""

    bounds: list[float]
    """Upper bounds of the buckets, in seconds; one more bucket follows for what took longer."""
    contexts: list[ContextTurns]
    """Those that had a turn, the shortest first."""


class WorkerFigures(msgspec.Struct, frozen=True):
    """What the metrics tell of a worker; None for what it did not tell."""

    in_flight: int = 0
    """Legs of all processes of this router."""
    breaker_open: bool = False
    """Whether some process sends it nothing since it kept failing."""
    started_at: float | None = None
    """Seconds since the epoch."""
    kv_usage: float | None = None
    """Share of its KV cache in use, 0 to 1."""
    kv_capacity_tokens: int | None = None
    retained_entries: int = 0
    retained_tokens: int = 0
    retained_share: float | None = None


class Figures(msgspec.Struct, frozen=True):
    """Of all processes of this router together, since it was started."""

    running: int
    queued: int
    turns: list[OutcomeTurns]
    prompt_tokens: PromptTokens
    ttft: Ttft
    workers: dict[tuple[str, str], WorkerFigures]
    """By role and name."""


def figures_of(families: Iterable[Metric]) -> Figures:
    """The figures in what ``/metrics`` shows."""
    samples = _Samples(families)
    fates = samples.by("turnback_prompt_tokens_total", "fate")
    return Figures(
        running=int(samples.sum("turnback_turns_running")),
        queued=int(samples.sum("turnback_turns_queued")),
        turns=[
            OutcomeTurns(outcome, reason, int(turns))
            for (outcome, reason), turns in sorted(samples.by("turnback_turns_total", "outcome", "reason").items())
            if turns
        ],
        prompt_tokens=PromptTokens(
            **{fate: int(fates.get((fate,), 0)) for fate in PromptTokens.__struct_fields__},
        ),
        ttft=_ttft(samples.by("turnback_context_ttft_seconds_bucket", "context", "reused", "le")),
        workers=_workers(samples),
    )


class _Samples:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._by_name = defaultdict(list)
        for family in families:
            for sample in family.samples:
                self._by_name[sample.name].append((sample.labels, sample.value))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums of the samples called ``name``, by the values of ``labels``."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for own, value in self._by_name[name]:
            sums[tuple(own[label] for label in labels)] += value
        return dict(sums)

    def sum(self, name: str) -> float:
        """Of all samples called ``name``."""
        return sum(value for _, value in self._by_name[name])


def _ttft(cumulative: dict[tuple[str, ...], float]) -> Ttft:
    bounds = sorted({float(le) for _, _, le in cumulative})
    at_most = {(context, reused, float(le)): int(turns) for (context, reused, le), turns in cumulative.items()}

    def counts(context: str, reused: str) -> list[int]:
        totals = [at_most.get((context, reused, bound), 0) for bound in bounds]
        return [total - before for before, total in zip([0, *totals], totals, strict=False)]

    contexts = [
        ContextTurns(context, counts(context, "yes"), counts(context, "no"))
        for context in sorted({context for context, _, _ in cumulative}, key=_shortest)
    ]
    # The last bound is infinite, which JSON has no number for.
    return Ttft(bounds[:-1], [one for one in contexts if any(one.reused) or any(one.plain)])


def _shortest(context: str) -> int:
    """In thousands of tokens, from where on a context is called so: "<=1k", "1k-2k", ">128k"."""
    found = re.search(r"\d+", context)
    return 0 if found is None or context.startswith("<") else int(found[0])


def _workers(samples: _Samples) -> dict[tuple[str, str], WorkerFigures]:
    by_role = {
        name: samples.by(f"turnback_worker_{name}", "role", "worker")
        for name in ("in_flight", "breaker_open", "start_time_seconds", "kv_usage", "kv_capacity_tokens")
    }
    on_decode = {name: samples.by(f"turnback_retained_{name}", "worker") for name in ("entries", "tokens", "share")}

    def figures(role: str, worker: str) -> WorkerFigures:
        told = {name: values.get((role, worker)) for name, values in by_role.items()}
        retained = {name: values.get((worker,)) if role == "decode" else None for name, values in on_decode.items()}
        return WorkerFigures(
            in_flight=int(told["in_flight"] or 0),
            breaker_open=bool(told["breaker_open"]),
            # A start at 0 is that of a worker that does not tell it.
            started_at=told["start_time_seconds"] or None,
            kv_usage=told["kv_usage"],
            kv_capacity_tokens=int(told["kv_capacity_tokens"] or 0) or None,
            retained_entries=int(retained["entries"] or 0),
            retained_tokens=int(retained["tokens"] or 0),
            retained_share=retained["share"],
        )

    keys = {key for values in by_role.values() for key in values}
    return {(role, worker): figures(role, worker) for role, worker in sorted(keys)}

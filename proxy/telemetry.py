"""What is counted and timed: everything that ``/metrics`` shows."""

import os
import platform
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.settings import Settings

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    300.0, 600.0,
)  # fmt: skip
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_PAUSE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 240, 480, 900, 1800, 3600)

_CONTEXT_LIMITS = tuple(1024 * 2**power for power in range(8))
CONTEXTS = ("<=1k", "1k-2k", "2k-4k", "4k-8k", "8k-16k", "16k-32k", "32k-64k", "64k-128k", ">128k")
"""Lengths of prompts as a label, in units of 1,024 tokens."""

_Mode = Literal["livesum", "livemax", "livemin", "max"]


def shared_folder() -> Path | None:
    """Where the processes of this proxy find each other's metrics; None where there is only one process."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return None if folder is None else Path(folder)


def context_of(prompt_tokens: int) -> str:
    """Which of ``CONTEXTS`` a prompt belongs to."""
    return CONTEXTS[bisect_left(_CONTEXT_LIMITS, prompt_tokens)]


class Metrics:
    """What ``/metrics`` shows. Labels are outcomes, reasons, endpoints and workers: never who or what was asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        # --- turns
        self.turns = self._counter("turns", "Turns by what became of reuse.", ("endpoint", "outcome", "reason"))
        self.ttft = self._histogram(
            "ttft_seconds", "Of streams: from the request's arrival to the first token.", ("endpoint", "outcome")
        )
        self.context_ttft = self._histogram(
            "context_ttft_seconds", "The same by length of the prompt and whether it was reused.", ("context", "reused")
        )
        self.tpot = self._histogram(
            "tpot_seconds", "Of streams whose tokens are known: seconds per token after the first.", ("endpoint",),
            _SHORT_SECONDS,
        )  # fmt: skip
        self.turn_seconds = self._histogram(
            "turn_seconds", "From the request's arrival to the end of the answer.", ("endpoint", "outcome")
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens: reused, computed again though an earlier turn had computed them, new; or nobody can tell.",
            ("fate",),
        )
        self.output_tokens = self._counter("output_tokens", "Generated tokens, of turns where they are known.")
        self.pause = self._histogram(
            "pause_seconds", "From the end of a conversation's answer to its next request.", (), _PAUSE_SECONDS
        )
        self.reuse_age = self._histogram("reuse_age_seconds", "Age of what was reused.", (), _PAUSE_SECONDS)
        self.running = self._gauge("turns_running", "Turns being served.", (), "livesum")
        self.queued = self._gauge("turns_queued", "Turns waiting for a place.", (), "livesum")
        self.queue_wait = self._histogram(
            "queue_seconds", "Waiting for a place, of turns that had to, whatever became of them."
        )
        self.refused = self._counter(
            "turns_refused",
            "Turns that were not begun: no room to wait, waited too long, or this process is about to end.",
            ("reason",),
        )

        # --- steps of a turn
        self._prefill = self._histogram(
            "prefill_seconds", "One prefill leg that came to something.", ("context", "reused")
        )
        self._prefill_tokens = self._counter(
            "prefill_tokens", "Tokens of those legs: computed by prefill, or copied from decode.",
            ("context", "reused", "kind"),
        )  # fmt: skip
        # Finding a series takes longer than counting in it, and there are few.
        self._prefill_of, self._prefill_tokens_of = cache(self._prefill.labels), cache(self._prefill_tokens.labels)
        self.decode_first_token = self._histogram(
            "decode_first_token_seconds", "Of streams: from sending the decode leg to its first token."
        )
        self.render = self._histogram("render_seconds", "Asking for a prompt's token ids.", (), _SHORT_SECONDS)
        self.store = self._histogram("store_seconds", "One call to the store.", ("call",), _SHORT_SECONDS)

        # --- trouble
        self.store_failures = self._counter(
            "store_failures", "Calls to the store that failed, or were not made since it had just failed.", ("call",)
        )
        self.fallbacks = self._counter("fallbacks", "Steps down from what was tried first.", ("reason",))
        self.retries = self._counter("retries", "Legs that a turn sent after one to the same role.", ("role",))
        self.releases = self._counter(
            "releases", "Retained blocks given back to decode before their time.", ("reason", "result")
        )
        self.without_params = self._counter(
            "answers_without_params",
            "Complete answers of decode that did not say what it holds, so that the next turn reuses nothing.",
            ("worker", "mode"),
        )

        # --- memory held. Each process looks at what is retained by all of them: their figures do not add up.
        self.retained_entries = self._gauge(
            "retained_entries", "Conversations retained on a decode worker.", ("worker",), "livemax"
        )
        self.retained_tokens = self._gauge(
            "retained_tokens", "Tokens retained on a decode worker.", ("worker",), "livemax"
        )
        self.retained_share = self._gauge(
            "retained_share", "Share of a worker's KV cache that is retained, from 0 to 1.", ("worker",), "livemax"
        )

        # --- settings by which others are read
        self.kv_blocks_ttl = self._gauge(
            "decoder_kv_blocks_ttl_seconds", "The setting decoder_kv_blocks_ttl: pauses above it bridge nothing.", (),
            "max",
        )  # fmt: skip
        self.recompute_threshold = self._gauge(
            "kv_recompute_threshold_tokens", "The setting kv_recompute_threshold: fewer tokens are not copied.", (),
            "max",
        )  # fmt: skip
        self.retained_share_bound = self._gauge(
            "retained_share_bound", "The setting retained_share: above it the oldest entries are given up.", (), "max"
        )

        # --- workers
        of_worker = ("role", "worker")
        self.worker_up = self._gauge("worker_up", "1 for a worker that answers its health probe.", of_worker, "livemin")
        self.worker_in_flight = self._gauge("worker_in_flight", "Legs running on a worker.", of_worker, "livesum")
        self.in_flight_on = cache(self.worker_in_flight.labels)
        """Finding a series takes longer than setting it, and there are few: by role and name of a worker."""
        self.worker_breaker_open = self._gauge(
            "worker_breaker_open", "1 for a worker that is sent no turns since it kept failing them.", of_worker,
            "livemax",
        )  # fmt: skip
        self.worker_draining = self._gauge(
            "worker_draining", "1 for a worker that gets no new work.", of_worker, "livemax"
        )
        self.worker_start = self._gauge(
            "worker_start_time_seconds", "When a worker was started, as it tells: a change is a restart.", of_worker,
            "livemax",
        )  # fmt: skip
        self.worker_kv_usage = self._gauge(
            "worker_kv_usage", "Share of a worker's KV cache in use, as it tells, from 0 to 1.", of_worker, "livemax"
        )
        self.worker_kv_capacity = self._gauge(
            "worker_kv_capacity_tokens", "Tokens for which a worker's KV cache has room.", of_worker, "livemax"
        )
        self.build = self._gauge("build_info", "1; the labels say what runs.", ("version", "python"), "max")
        self.build.labels(version("turnback"), platform.python_version()).set(1)

    def tell_settings(self, settings: Settings) -> None:
        """Those by which others are read. They stay for as long as the router runs."""
        self.kv_blocks_ttl.set(settings.decoder_kv_blocks_ttl)
        self.recompute_threshold.set(settings.kv_recompute_threshold)
        self.retained_share_bound.set(settings.retained_share)

    def prefilled(self, seconds: float, prompt_tokens: int, reused: int) -> None:
        """A prefill leg, ``reused`` of whose prompt's tokens were copied from decode."""
        context, told = context_of(prompt_tokens), "yes" if reused else "no"
        self._prefill_of(context, told).observe(seconds)
        self._prefill_tokens_of(context, told, "computed").inc(prompt_tokens - reused)
        self._prefill_tokens_of(context, told, "copied").inc(reused)

    def forget_worker(self, role: str, worker: str) -> None:
        """A worker is not in the pool any more: alerts on it end."""
        self.in_flight_on.cache_clear()
        told_alike = (self.worker_in_flight, self.worker_breaker_open, self.worker_draining, self.worker_kv_usage)
        retained = (self.retained_entries, self.retained_tokens, self.retained_share)
        if shared_folder() is not None:
            # There samples stay for as long as the process; these values alarm nobody.
            self.worker_up.labels(role, worker).set(1)
            for gauge in told_alike:
                gauge.labels(role, worker).set(0)
            if role == "decode":
                for gauge in retained:
                    gauge.labels(worker).set(0)
            return
        for gauge in (*told_alike, self.worker_up, self.worker_start, self.worker_kv_capacity):
            gauge.remove_by_labels({"role": role, "worker": worker})
        if role == "decode":
            for gauge in retained:
                gauge.remove_by_labels({"worker": worker})

    def exposition(self) -> bytes:
        """In Prometheus's text format; of all processes of this proxy together."""
        return generate_latest(self._together())

    def families(self) -> Iterable[Metric]:
        """The same, for who works with it."""
        return self._together().collect()

    def _together(self) -> CollectorRegistry:
        if shared_folder() is None:
            return self.registry
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"turnback_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, labels: Sequence[str], together: _Mode) -> Gauge:
        """``together``: what becomes of several processes' values."""
        return Gauge(f"turnback_{name}", what, labels, registry=self.registry, multiprocess_mode=together)

    def _histogram(
        self, name: str, what: str, labels: Sequence[str] = (), buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        return Histogram(f"turnback_{name}", what, labels, buckets=buckets, registry=self.registry)

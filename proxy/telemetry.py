"""Metrics and logs."""

import logging
import os
import sys
from typing import TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.settings import Settings

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """What ``/metrics`` shows. Labels are outcomes, reasons, endpoints and workers: never who or what was asked."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.turns = Counter(
            "turnback_turns",
            "Turns by what became of reuse.",
            ("endpoint", "outcome", "reason"),
            registry=registry,
        )
        self.ttft = Histogram(
            "turnback_ttft_seconds",
            "Of streams: from the request's arrival to the first token.",
            ("endpoint", "outcome"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.turn_seconds = Histogram(
            "turnback_turn_seconds",
            "From the request's arrival to the end of the answer.",
            ("endpoint", "outcome"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.prefill = Histogram(
            "turnback_prefill_seconds", "One prefill leg.", ("reused",), buckets=_SECONDS, registry=registry
        )
        self.render = Histogram(
            "turnback_render_seconds",
            "Asking for a prompt's token ids.",
            (),
            buckets=_SHORT_SECONDS,
            registry=registry,
        )
        self.store = Histogram(
            "turnback_store_seconds",
            "One call to the store.",
            ("call",),
            buckets=_SHORT_SECONDS,
            registry=registry,
        )
        self.store_failures = Counter(
            "turnback_store_failures", "Calls to the store that failed, or were not made since it had just failed.",
            ("call",), registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "turnback_prompt_tokens", "Prompt tokens of turns, where known: reused or computed by prefill.",
            ("fate",), registry=registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "turnback_fallbacks", "Steps down from what was tried first.", ("reason",), registry=registry
        )
        self.releases = Counter(
            "turnback_releases", "Retained blocks given back to decode before their time.",
            ("reason", "result"), registry=registry,
        )  # fmt: skip
        self.without_params = Counter(
            "turnback_answers_without_params",
            "Complete answers of decode that did not say what it holds, so that the next turn reuses nothing.",
            ("worker", "mode"),
            registry=registry,
        )
        # Each process looks at everything that is retained, by all of them: their figures do not add up.
        self.retained_entries = Gauge(
            "turnback_retained_entries", "Conversations retained on a decode worker.", ("worker",),
            registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self.retained_tokens = Gauge(
            "turnback_retained_tokens", "Tokens retained on a decode worker.", ("worker",),
            registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self.retained_share = Gauge(
            "turnback_retained_share", "Share of a worker's KV cache that is retained, from 0 to 1.", ("worker",),
            registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self.worker_up = Gauge(
            "turnback_worker_up", "1 for a worker that answers its health probe.", ("role", "worker"),
            registry=registry, multiprocess_mode="min",
        )  # fmt: skip
        self.worker_in_flight = Gauge(
            "turnback_worker_in_flight", "Legs running on a worker.", ("role", "worker"),
            registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self.worker_breaker_open = Gauge(
            "turnback_worker_breaker_open", "1 for a worker that is sent no turns since it kept failing them.",
            ("role", "worker"), registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self.worker_draining = Gauge(
            "turnback_worker_draining", "1 for a worker that gets no new work.", ("role", "worker"),
            registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self.running = Gauge(
            "turnback_turns_running", "Turns being served.", registry=registry, multiprocess_mode="livesum"
        )
        self.queued = Gauge(
            "turnback_turns_queued", "Turns waiting for a place.", registry=registry, multiprocess_mode="livesum"
        )
        self.queue_wait = Histogram(
            "turnback_queue_seconds",
            "Waiting for a place, of turns that had to, whatever became of them.",
            (),
            buckets=_SECONDS,
            registry=registry,
        )
        self.refused = Counter(
            "turnback_turns_refused",
            "Turns that were not begun: no room to wait, waited too long, or this process is about to end.",
            ("reason",),
            registry=registry,
        )

    def forget_worker(self, role: str, worker: str) -> None:
        """A worker is not in the pool any more: alerts on it end."""
        retained = (self.retained_entries, self.retained_tokens, self.retained_share)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            # There samples stay for as long as the process; these values alarm nobody.
            self.worker_up.labels(role, worker).set(1)
            for gauge in (self.worker_in_flight, self.worker_breaker_open, self.worker_draining):
                gauge.labels(role, worker).set(0)
            if role == "decode":
                for gauge in retained:
                    gauge.labels(worker).set(0)
            return
        for gauge in (self.worker_up, self.worker_in_flight, self.worker_breaker_open, self.worker_draining):
            gauge.remove_by_labels({"role": role, "worker": worker})
        if role == "decode":
            for gauge in retained:
                gauge.remove_by_labels({"worker": worker})

    def exposition(self) -> bytes:
        """In Prometheus's text format; of all processes of this proxy together."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            together = CollectorRegistry()
            MultiProcessCollector(together)  # type: ignore[no-untyped-call]
            return generate_latest(together)
        return generate_latest(self.registry)


def set_up_logging(settings: Settings, stream: TextIO | None = None) -> None:
    """Structured lines on ``stream`` (standard error), uvicorn's own included."""
    stream = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            # The pretty one shows local variables: prompts and keys.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    level = getattr(logging, settings.log_level.upper())
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer]
        if settings.log_format == "json"
        else [*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    # It tells of every change in the folder, whether it concerns the config file or not.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)

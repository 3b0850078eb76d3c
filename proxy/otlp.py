"""Spans on their way to a collector. A turn never waits for them, and never fails with them."""

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from importlib.metadata import version

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Tracer
from opentelemetry.util.types import AnyValue

log = structlog.get_logger()

_TELL_EVERY_FAILURE = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")
"""Loggers of the library's that say so for each batch that is not delivered, and for each span that is dropped."""

_QUOTES_HEADERS = "opentelemetry.util.re"
"""Logger that quotes a header of the operator's that it cannot read: it may be a credential."""


class Delivery(SpanExporter):
    """Hands batches on to the exporter. Says once that it cannot deliver, and once that it can again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Deliver, within the exporter's time-out; what cannot be delivered is lost."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._failed()
        elif self.failing:
            log.info("the trace collector takes spans again")
            self.failing = False
        return result

    def give_up(self) -> None:
        """The collector takes too long: try nothing again."""
        self._failed()
        self._exporter.shutdown()

    def shutdown(self) -> None:
        """See ``SpanExporter``."""
        self._exporter.shutdown()

    def _failed(self) -> None:
        if not self.failing:
            log.warning("the trace collector does not take spans: they are dropped until it does")
        self.failing = True


class Collector:
    """An OTLP/HTTP collector, and the tracer whose spans it gets, in batches, from a thread of their own.

    The library reads ``OTEL_*`` variables for the rest: headers and certificates, resource attributes, batch sizes.
    """

    def __init__(self, url: str, sample_ratio: float) -> None:
        """``url`` is where spans are posted to; ``sample_ratio`` is for turns whose clients did not decide."""
        self._url = url
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio), resource=_resource(), shutdown_on_exit=False
        )
        self._delivery: Delivery | None = None
        self.tracer: Tracer = self._provider.get_tracer("turnback", version("turnback"))

    def start(self) -> None:
        """Begin to send. Spans that were ended before are lost."""
        for name in _TELL_EVERY_FAILURE:
            wanted = logging.getLogger().isEnabledFor(logging.DEBUG)
            logging.getLogger(name).setLevel(logging.NOTSET if wanted else logging.CRITICAL)
        logging.getLogger(_QUOTES_HEADERS).setLevel(logging.CRITICAL)
        self._delivery = Delivery(OTLPSpanExporter(endpoint=self._url))
        self._provider.add_span_processor(BatchSpanProcessor(self._delivery))

    async def stop(self, patience: float) -> None:
        """Send what is left, for up to ``patience`` seconds; nothing if the collector does not answer anyway."""
        if self._delivery is None:
            return
        if self._delivery.failing:
            self._delivery.give_up()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            # The loop is gone if this took too long.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        # Not one of the loop's own threads: the process would wait for it at its end.
        threading.Thread(target=end, daemon=True).start()
        try:
            async with asyncio.timeout(patience):
                await ended.wait()
        except TimeoutError:
            self._delivery.give_up()


def _resource() -> Resource:
    """Who sends the spans; what the operator's ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say wins."""
    ours: dict[str, AnyValue] = {
        "service.name": "turnback",
        "service.version": version("turnback"),
        "service.instance.id": uuid.uuid4().hex,
        "process.pid": os.getpid(),
    }
    return Resource.create(ours | dict(OTELResourceDetector().detect().attributes or {}))

"""A turn's own span, above all its others."""

import structlog
from opentelemetry.semconv.attributes.http_attributes import (
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
)
from opentelemetry.trace import Span, SpanKind, Tracer, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.call import REPORT, Report
from proxy.spans import TURN, TracedTurn, current, fail, tell
from proxy.trace_context import trace_context

_PROPAGATOR = TraceContextTextMapPropagator()
_CLIENT_GONE = 499


class TracedEndpoint:
    """An endpoint, each request to which is a span, below the client's own if its request tells of one."""

    def __init__(self, endpoint: ASGIApp, path: str, tracer: Tracer) -> None:
        self._endpoint = endpoint
        self._name = f"POST {path}"
        self._attributes = {HTTP_REQUEST_METHOD: "POST", HTTP_ROUTE: path}
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Its lines in the log have its ``trace_id``."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        above = _PROPAGATOR.extract(trace_context(headers))
        span = self._tracer.start_span(self._name, above, SpanKind.SERVER, self._attributes)
        turn = TracedTurn(self._tracer)
        before = TURN.set(turn if span.is_recording() else None)
        trace_id = format_trace_id(span.get_span_context().trace_id)
        try:
            with current(span, ends=True), structlog.contextvars.bound_contextvars(trace_id=trace_id):
                try:
                    await self._endpoint(scope, receive, send)
                finally:
                    report = scope.get(REPORT)
                    if isinstance(report, Report):
                        _tell(span, report, turn.failure)
        finally:
            TURN.reset(before)


def _tell(span: Span, report: Report, failure: str) -> None:
    span.set_attribute(HTTP_RESPONSE_STATUS_CODE, report.status)
    tell(
        span,
        outcome=report.outcome,
        reason=report.reason,
        turn=report.turn,
        conversation=report.conversation or None,
        prompt_tokens=report.prompt_tokens,
        reused_tokens=report.reused_tokens,
    )
    if report.status == _CLIENT_GONE:
        tell(span, cancelled=True)
    elif report.status >= 500:
        fail(span, f"status {report.status}")
    elif failure:
        fail(span, failure)

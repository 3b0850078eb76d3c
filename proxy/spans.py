"""Spans of a turn. Outside of turns nothing is traced: probes and what is done at intervals would hide them.

What a turn leaves to be done in the background inherits its context, so that it is part of its trace, though it may
end after the turn's own span.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry.semconv.attributes.http_attributes import HTTP_RESPONSE_STATUS_CODE
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer, use_span

from proxy.upstream import Failed, Refused

Value = str | bool | int | float | None


@dataclass
class TracedTurn:
    """A turn whose steps become spans."""

    tracer: Tracer
    failure: str = ""
    """What went wrong after the answer had begun, when its status could not tell any more."""


TURN: ContextVar[TracedTurn | None] = ContextVar("traced_turn", default=None)
"""The turn for which the running code works; None if it is not traced, or it is no turn's work."""


def tell(span: Span, **values: Value) -> None:
    """Add attributes of ours; those that are None are not known."""
    span.set_attributes({f"turnback.{name}": value for name, value in values.items() if value is not None})


def fail(span: Span, detail: str) -> None:
    """What ``span`` stands for came to nothing. ``detail`` must not quote what a client or a worker sent."""
    span.set_status(StatusCode.ERROR, detail)


def tell_answer(span: Span, answer: object) -> None:
    """What became of a request to a worker."""
    match answer:
        case Failed(detail, status):
            fail(span, detail)
            if status is not None:
                span.set_attribute(HTTP_RESPONSE_STATUS_CODE, status)
        case Refused(status):
            tell_status(span, status)


def tell_status(span: Span, status: int) -> None:
    """With which status a worker answered."""
    span.set_attribute(HTTP_RESPONSE_STATUS_CODE, status)
    if status >= 400:
        fail(span, f"status {status}")


def begin(turn: TracedTurn, name: str, kind: SpanKind, values: Mapping[str, Value]) -> Span:
    """A span below the current one. Whoever begins it ends it."""
    span = turn.tracer.start_span(name, kind=kind)
    tell(span, **values)
    return span


@contextmanager
def current(span: Span, *, ends: bool) -> Iterator[Span]:
    """What is done within belongs to ``span``; ``ends``: which is over then.

    The library is not let note exceptions: their texts may quote what was sent.
    """
    with use_span(span, end_on_exit=ends, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except asyncio.CancelledError:
            tell(span, cancelled=True)
            raise


@contextmanager
def step(name: str, kind: SpanKind = SpanKind.INTERNAL, **values: Value) -> Iterator[Span]:
    """A span for what is done within, if it is done for a turn that is traced."""
    turn = TURN.get()
    if turn is None:
        yield INVALID_SPAN
        return
    with current(begin(turn, name, kind, values), ends=True) as span:
        yield span

"""A trace collector: takes what the router sends over OTLP/HTTP, and shows it as a test wants it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.running import eventually

Json = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A span as it came; ``attributes`` without the ``turnback.`` before the router's own."""

    trace: str
    id: str
    parent: str
    name: str
    kind: str
    begin: int
    """Nanoseconds since the epoch, as ``end``."""
    end: int
    attributes: Json
    events: list[str]
    error: str | None
    """What it says of its failure; None if it has not failed."""
    state: str

    @property
    def traceparent(self) -> str:
        """As its children's requests carry it."""
        return f"00-{self.trace}-{self.id}"


@dataclass
class Collector:
    """Listens on a free loopback port between ``async with`` and its end."""

    status: int = 200
    received: list[bytes] = field(default_factory=list)
    resources: list[Json] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _port: int = 0

    @property
    def url(self) -> str:
        """For the setting ``otlp_endpoint``."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Collector:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def turn(self, number: int = 0) -> Turn:
        """The turn that ended as the ``number``-th, when it is here; spans that end later may be missing."""
        await eventually(lambda: len(self._turns()) > number)
        return Turn(self, self._turns()[number])

    def _turns(self) -> list[Span]:
        return [span for span in self.spans if span.kind == "SERVER"]

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.paths.append(request.path)
        if self.status == 200:
            self.received.append(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_plain(resource.resource.attributes))
                self.spans += (_span(span) for scope in resource.scope_spans for span in scope.spans)
        return web.Response(status=self.status)


@dataclass(frozen=True)
class Turn:
    """One turn's spans."""

    collector: Collector
    root: Span

    def __iter__(self) -> Iterator[Span]:
        return (span for span in self.collector.spans if span.trace == self.root.trace)

    async def has(self, *names: str) -> list[Span]:
        """The spans right below its own when there are these and no others, in the order of their beginnings."""
        await eventually(lambda: len(self._below()) >= len(names))
        assert sorted(span.name for span in self._below()) == sorted(names)
        assert {span.id for span in self} == {span.id for span in self._below()} | {self.root.id}
        return sorted(self._below(), key=lambda span: span.begin)

    def _below(self) -> list[Span]:
        return [span for span in self if span.parent == self.root.id]


def _span(span: OtlpSpan) -> Span:
    return Span(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        kind=OtlpSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events=[event.name for event in span.events],
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
        state=span.trace_state,
    )


def _plain(attributes: Any) -> Json:
    found: list[KeyValue] = list(attributes)
    return {pair.key.removeprefix("turnback."): _value(pair.value) for pair in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)

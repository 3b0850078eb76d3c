"""The address of a trace collector."""

from __future__ import annotations

import sys

import pytest

from proxy.collector_url import collector_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_spans_go_where_otlp_says(text: str, url: str) -> None:
    assert collector_url(text) == url


@pytest.mark.parametrize("text", ["http://user:hush@c:4318", "ftp://user:hush@c", "http://user:hush@c:port"])
def test_a_credential_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match=r"OTEL_EXPORTER_OTLP_HEADERS|is no URL") as raised:
        collector_url(text)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "missing", ["opentelemetry.exporter", "opentelemetry.exporter.otlp.proto.http", "opentelemetry"]
)
def test_without_the_packages_it_is_said_how_to_get_them(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("opentelemetry"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"turnback\[traces\]"):
        collector_url("http://c:4318")

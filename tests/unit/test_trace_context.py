"""Which headers tell of a client's trace."""

from __future__ import annotations

import pytest

from proxy.trace_context import trace_context

PARENT = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"


def test_both_headers_as_they_came() -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=1,b=2", "x": "y"}
    assert trace_context(headers) == {"traceparent": PARENT, "tracestate": "a=1,b=2"}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        PARENT.upper(),
        PARENT[:-3],
        PARENT + "-00",
        PARENT + "\n",
        " " + PARENT,
        "ff" + PARENT[2:],
        PARENT.replace("a1" * 16, "0" * 32),
        PARENT.replace("b2" * 8, "0" * 16),
    ],
)
def test_one_that_is_none(parent: str) -> None:
    assert trace_context({"traceparent": parent, "tracestate": "a=1"}) == {}


def test_no_state_without_a_parent() -> None:
    assert trace_context({"tracestate": "a=1"}) == {}


@pytest.mark.parametrize("state", ["", "a=\r\nx-evil: 1", "a=\x00", "a=ä", "a=" + "b" * 600])
def test_a_state_that_no_worker_should_get(state: str) -> None:
    assert trace_context({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}

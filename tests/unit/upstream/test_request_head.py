"""What a request begins with."""

from __future__ import annotations

import pytest

from proxy.http_url import Address
from proxy.request_head import RequestHeads, UnsafeHeader


def heads(url: str = "http://worker:8001", **headers: str) -> RequestHeads:
    return RequestHeads(Address.of(url), headers)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://worker:8001", Address("worker", 8001, False, "worker:8001", "")),
        ("http://worker", Address("worker", 80, False, "worker", "")),
        ("http://worker:80/", Address("worker", 80, False, "worker", "")),
        ("https://worker", Address("worker", 443, True, "worker", "")),
        ("https://worker:443", Address("worker", 443, True, "worker", "")),
        ("https://worker:80", Address("worker", 80, True, "worker:80", "")),
        ("http://[::1]:8001/a/b", Address("::1", 8001, False, "[::1]:8001", "/a/b")),
        ("http://[2001:db8::1]", Address("2001:db8::1", 80, False, "[2001:db8::1]", "")),
        ("http://10.0.0.1:8001/a b", Address("10.0.0.1", 8001, False, "10.0.0.1:8001", "/a%20b")),
        ("http://bücher:1", Address("xn--bcher-kva", 1, False, "xn--bcher-kva:1", "")),
    ],
)
def test_an_address(url: str, address: Address) -> None:
    assert Address.of(url) == address


def test_a_post() -> None:
    assert heads("http://worker:8001/a", Accept="*/*").post("/v1/x", {}, {}, "r-1", 12) == (
        b"POST /a/v1/x HTTP/1.1\r\n"
        b"Host: worker:8001\r\n"
        b"User-Agent: turnback\r\n"
        b"Accept: */*\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 12\r\n"
        b"X-Request-Id: r-1\r\n"
        b"\r\n"
    )


def test_a_get() -> None:
    assert heads().get("/health", {"X-Rank": "1"}, {}) == (
        b"GET /health HTTP/1.1\r\nHost: worker:8001\r\nUser-Agent: turnback\r\nX-Rank: 1\r\n\r\n"
    )


def test_the_more_particular_header_counts() -> None:
    """Ours are for all workers; one may have its own; a client's own go before both."""
    made = heads(Authorization="all")
    own = made.post("/", {"authorization": "own"}, {}, "", 0)
    assert b"own" in own
    assert b"all" not in own
    clients = made.post("/", {"authorization": "own"}, {"AUTHORIZATION": "client"}, "", 0)
    assert b"AUTHORIZATION: client\r\n" in clients
    assert b"own" not in clients
    assert b"all" in made.post("/", {}, {"traceparent": "t"}, "", 0)


def test_heads_do_not_get_mixed_up() -> None:
    made = heads()
    for _ in range(2):
        assert b"X-Rank: 1\r\n" in made.post("/", {"X-Rank": "1"}, {}, "", 0)
        assert b"X-Rank: 2\r\n" in made.post("/", {"X-Rank": "2"}, {}, "", 0)
        assert b"X-Rank" not in made.post("/", {}, {}, "", 0)
        assert made.post("/other", {}, {}, "", 0).startswith(b"POST /other ")
        assert made.get("/other", {}, {}).startswith(b"GET /other ")
        assert b"traceparent: a\r\n" in made.post("/", {}, {"traceparent": "a"}, "", 0)
        assert b"traceparent: b\r\n" in made.post("/", {}, {"traceparent": "b"}, "", 0)


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nX: y", "a\rX: y", "\0", "a\r\n", "\u20ac", "\u560a"])
def test_a_header_that_would_be_something_else_on_the_wire_is_refused(value: str) -> None:
    for request_id, headers, forwarded in (
        (value, {}, {}),
        ("", {"X": value}, {}),
        ("", {}, {"Authorization": value}),
        ("", {}, {value: "x"}),
    ):
        with pytest.raises(UnsafeHeader) as refused:
            heads().post("/", headers, forwarded, request_id, 0)
        assert value not in str(refused.value)
    with pytest.raises(UnsafeHeader):
        heads().get("/", {}, {"Authorization": value})


def test_bytes_of_latin_1_are_sent_as_they_came() -> None:
    assert b"Authorization: caf\xe9\r\n" in heads().post("/", {}, {"Authorization": "caf\u00e9"}, "", 0)

"""An answer is the same wherever the reads are cut, and never whole before it is."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http_answer import MOST_OVERHEAD, HttpAnswer


@dataclass(frozen=True)
class Case:
    """What is sent, and what it means."""

    wire: bytes
    status: int
    body: bytes
    content_type: str = ""
    reusable: bool = True
    until_end: bool = False


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"

CASES = {
    "length": Case(OK + b"Content-Type: a/b; c=d\r\nContent-Length: 3\r\n\r\nabc", 200, b"abc", "a/b; c=d"),
    "length, spaces around": Case(OK + b"content-length:  3 \r\nContent-TYPE:\t a/b \r\n\r\nabc", 200, b"abc", "a/b"),
    "length, empty headers before": Case(OK + b"A:\r\nB: \r\nContent-Length: 3\r\n\r\nabc", 200, b"abc"),
    "length 0": Case(b"HTTP/1.1 500 Oh no\r\nContent-Length: 0\r\n\r\n", 500, b""),
    "no reason": Case(b"HTTP/1.1 404\r\nContent-Length: 1\r\n\r\nx", 404, b"x"),
    "chunked": Case(CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", 200, b"abcde", "text/event-stream"),
    "chunked, in capitals": Case(
        OK + b"TRANSFER-ENCODING: Chunked\r\n\r\nA\r\n012345678\n\r\n0\r\n\r\n", 200, b"012345678\n"
    ),
    "chunked, empty": Case(CHUNKED + b"0\r\n\r\n", 200, b"", "text/event-stream"),
    "chunked, extensions": Case(CHUNKED + b'3;x=y\r\nabc\r\n0;z="w"\r\n\r\n', 200, b"abc", "text/event-stream"),
    "chunked, trailers": Case(
        CHUNKED + b"3\r\nabc\r\n0\r\nContent-Type: no/no\r\nMore:\r\n\r\n", 200, b"abc", "text/event-stream"
    ),
    "until its end": Case(OK + b"Content-Type: a/b\r\n\r\nabc", 200, b"abc", "a/b", reusable=False, until_end=True),
    "until its end, 1.0": Case(b"HTTP/1.0 200 OK\r\n\r\n", 200, b"", reusable=False, until_end=True),
    "close": Case(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nab", 200, b"ab", reusable=False),
    "close, chunked": Case(
        OK + b"Connection: Close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 200, b"a", reusable=False
    ),
    "1.0": Case(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", 200, b"ab", reusable=False),
    "1.0, keep-alive": Case(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nab", 200, b"ab"),
    "204": Case(b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "304": Case(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b""),
    "100 and 103 before": Case(
        b"HTTP/1.1 100 Continue\r\nContent-Type: no/no\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        + OK
        + b"Content-Type: a/b\r\nContent-Length: 1\r\n\r\na",
        200,
        b"a",
        "a/b",
    ),
    "100 with a length before": Case(
        b"HTTP/1.1 100 Continue\r\nContent-Length: 7\r\n\r\n" + OK + b"\r\nab", 200, b"ab",
        reusable=False, until_end=True,
    ),
    "upgrade offered": Case(
        OK + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab", 200, b"ab"
    ),
    "empty lines before": Case(b"\r\n" + OK + b"Content-Length: 2\r\n\r\nab", 200, b"ab"),
}  # fmt: skip

ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def fed(pieces: Iterable[bytes], *, ends: bool = False) -> HttpAnswer:
    answer = HttpAnswer()
    for piece in pieces:
        answer.feed(piece)
    if ends:
        answer.end()
    return answer


def one_by_one(wire: bytes) -> list[bytes]:
    return [wire[place : place + 1] for place in range(len(wire))]


def check(case: Case, answer: HttpAnswer) -> None:
    assert not answer.broken
    assert answer.over
    seen = answer.status, answer.take(), answer.content_type, answer.reusable
    assert seen == (case.status, case.body, case.content_type, case.reusable)
    assert not answer.waiting


@ALL
def test_an_answer_that_comes_at_once(case: Case) -> None:
    check(case, fed([case.wire], ends=case.until_end))


@ALL
def test_an_answer_that_comes_byte_by_byte(case: Case) -> None:
    check(case, fed(one_by_one(case.wire), ends=case.until_end))


@ALL
def test_an_answer_that_comes_in_two_pieces(case: Case) -> None:
    for place in range(1, len(case.wire)):
        check(case, fed([case.wire[:place], case.wire[place:]], ends=case.until_end))


@given(st.sampled_from(list(CASES.values())), st.data())
def test_an_answer_that_comes_in_any_pieces(case: Case, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(1, len(case.wire) - 1), max_size=12))
    edges = [0, *sorted(places), len(case.wire)]
    check(case, fed([case.wire[begin:end] for begin, end in pairwise(edges)], ends=case.until_end))


@ALL
def test_an_answer_that_ends_too_early_is_never_whole(case: Case) -> None:
    body_begins = case.wire.rindex(b"\r\n\r\n") + 4 if case.until_end else len(case.wire)
    for place in range(min(body_begins, len(case.wire))):
        answer = fed([case.wire[:place]])
        assert not answer.over
        answer.end()
        assert not answer.over
        assert answer.broken.startswith("closed")
        answer.feed(case.wire[place:])
        assert not answer.over


@ALL
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "more", [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxyz", b"x", b"0\r\n\r\n", b"HTTP"], ids=repr
)
def test_what_comes_after_an_answer_is_not_of_it_and_ends_the_connection(case: Case, more: bytes, split: bool) -> None:
    if case.until_end:
        return
    answer = fed(one_by_one(case.wire + more) if split else [case.wire + more])
    assert answer.over
    assert not answer.broken
    assert (answer.status, answer.take(), answer.content_type) == (case.status, case.body, case.content_type)
    assert not answer.reusable


WRONG = {
    "no HTTP": b"SECRET\r\n\r\n",
    "no version": b"HTTP/x SECRET\r\n\r\n",
    "no status": b"HTTP/1.1 SECRET\r\n\r\n",
    "status of two digits": b"HTTP/1.1 99 SECRET\r\nContent-Length: 0\r\n\r\n",
    "status below 100": b"HTTP/1.1 099 SECRET\r\nContent-Length: 0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nS",
    "length and chunked": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "negative length": OK + b"Content-Length: -1\r\n\r\n",
    "signed length": OK + b"Content-Length: +1\r\n\r\nS",
    "no length": OK + b"Content-Length:\r\n\r\nSECRET",
    "length in words": OK + b"Content-Length: SECRET\r\n\r\n",
    "two lengths in one": OK + b"Content-Length: 1, 1\r\n\r\nS",
    "overlong length": OK + b"Content-Length: 18446744073709551616\r\n\r\n",
    "zipped": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\nS\r\n0\r\n\r\n",
    "zipped until its end": OK + b"Transfer-Encoding: gzip\r\n\r\nSECRET",
    "identity": OK + b"Transfer-Encoding: identity\r\n\r\nSECRET",
    "chunked, then not": OK + b"Transfer-Encoding: chunked, identity\r\n\r\nSECRET",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded header": OK + b"A: b\r\n SECRET\r\nContent-Length: 0\r\n\r\n",
    "space before the colon": OK + b"Content-Length : 0\r\n\r\n",
    "NUL in a header": OK + b"A: \0SECRET\r\nContent-Length: 0\r\n\r\n",
    "chunk longer than it says": CHUNKED + b"1\r\nSECRET\r\n0\r\n\r\n",
    "chunk of no length": CHUNKED + b"\r\n",
    "chunk of length in words": CHUNKED + b"SECRET\r\n",
    "chunk of overlong length": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\n",
    "trailer with a length": CHUNKED + b"0\r\nContent-Length: 7\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 SECRET\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nSECRET",
    "upgrade to nothing": b"HTTP/1.1 101 SECRET\r\n\r\n" + OK + b"Content-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("wire", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("split", [False, True])
def test_what_is_no_answer_is_broken_and_not_quoted(wire: bytes, split: bool) -> None:
    answer = fed(one_by_one(wire) if split else [wire], ends=True)
    assert answer.broken
    assert not answer.over
    assert "SECRET" not in answer.broken


def test_a_head_within_bounds_is_read() -> None:
    wire = OK + b"A: %b\r\nContent-Length: 1\r\n\r\na" % (b"x" * (MOST_OVERHEAD - 100))
    for pieces in ([wire], one_by_one(wire)):
        assert fed(pieces).over


@pytest.mark.parametrize(
    "wire",
    [
        OK + b"A: %b\r\nContent-Length: 1\r\n\r\na" % (b"x" * MOST_OVERHEAD),
        OK + b"A: b\r\n" * (MOST_OVERHEAD // 4) + b"Content-Length: 1\r\n\r\na",
        b"HTTP/1.1 200 %b\r\nContent-Length: 1" % (b"x" * MOST_OVERHEAD),
        b"\r\n" * MOST_OVERHEAD,
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MOST_OVERHEAD // 20),
        CHUNKED + b"1;%b" % (b"x" * MOST_OVERHEAD),
        CHUNKED + b"1\r\na\r\n0\r\nA: %b\r\n\r\n" % (b"x" * MOST_OVERHEAD),
        CHUNKED + b"1\r\na\r\n0\r\n" + b"A: b\r\n" * (MOST_OVERHEAD // 4) + b"\r\n",
    ],
    ids=["header", "headers", "reason", "empty lines", "interim", "extension", "trailer", "trailers"],
)
@pytest.mark.parametrize("size", [1, 1000, 2**20])
def test_what_is_no_body_is_bounded(wire: bytes, size: int) -> None:
    answer = HttpAnswer()
    taken = 0
    while taken < len(wire) and not answer.broken:
        answer.feed(wire[taken : taken + size])
        taken += size
    assert "too" in answer.broken
    assert not answer.over


def test_a_long_body_is_not_bounded() -> None:
    answer = fed([CHUNKED])
    for _ in range(100):
        answer.feed(b"8000\r\n" + bytes(0x8000) + b"\r\n")
    answer.feed(b"0\r\n\r\n")
    assert answer.over
    assert len(answer.take()) == 100 * 0x8000


def test_many_short_chunks_are_not_taken_for_overhead() -> None:
    answer = fed([CHUNKED, *[b"1\r\na\r\n"] * MOST_OVERHEAD, b"0\r\n\r\n"])
    assert answer.over
    assert answer.take() == b"a" * MOST_OVERHEAD


def test_what_was_taken_is_not_there_again() -> None:
    answer = fed([CHUNKED])
    assert (answer.status, answer.waiting, answer.take()) == (200, 0, b"")
    answer.feed(b"1\r\na\r\n1\r\nb\r\n")
    assert (answer.waiting, answer.take(), answer.waiting) == (2, b"ab", 0)
    answer.feed(b"1\r\nc\r\n0\r\n\r\n")
    assert (answer.over, answer.take(), answer.take()) == (True, b"c", b"")


def test_answers_leave_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            fed([CHUNKED + b"0\r\n\r\n"])
            fed([b"SECRET"])
            fed([CHUNKED], ends=True)
            fed([CHUNKED]).fail("given up")
        assert gc.collect() == 0
    finally:
        gc.enable()

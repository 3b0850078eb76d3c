"""A worker's answer as it is made of the bytes that come: HTTP/1.1, no sockets."""

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MOST_OVERHEAD = 64 * 1024
"""Bytes of a head, and of what may lie between two parts of a body."""


class _Enough(Exception):
    """The parser has nothing more to do."""


class HttpAnswer:
    """One answer. It is complete when ``over``; until then, or where it is ``broken``, it is not to be relied on.

    Answers of status 1xx, which come before the one that counts, are passed over.
    """

    __slots__ = (
        "_chunked",
        "_ends_by_length",
        "_overhead",
        "_parser",
        "_parts",
        "_since_part",
        "begun",
        "broken",
        "content_type",
        "over",
        "reusable",
        "status",
        "unanswered",
        "waiting",
    )

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is complete."""
        self.content_type = ""
        """As it came; empty if there is none."""
        self.begun = False
        """Whether any byte came."""
        self.over = False
        """Whether all of it came."""
        self.broken = ""
        """Why it will never be complete, for people; no word of it is the answer's own. Empty if it may be yet."""
        self.unanswered = False
        """Whether the connection was lost before any byte came."""
        self.reusable = False
        """Once it is over: whether the connection may carry another request."""
        self.waiting = 0
        """Bytes of the body that were not taken."""
        self._parts: list[bytes] = []
        self._chunked = False
        self._ends_by_length = False
        self._overhead = 0
        self._since_part = 0
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """What came on the connection. Bytes after the answer's end make the connection unusable for another."""
        parser = self._parser
        if parser is None:
            self.reusable = False
            return
        self.begun = True
        self._since_part += len(data)
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.reusable = False
            if not self.over and not self.broken:
                self.broken = f"no HTTP: {error}"
        if self._since_part > MOST_OVERHEAD and not self.over and not self.broken:
            self.broken = "too much that is no body"
        if self.over or self.broken:
            # It refers to this object, which would be left to the garbage collector.
            self._parser = None

    def end(self) -> None:
        """Nothing more will come, as the worker itself said."""
        if self.status and not self._chunked and not self._ends_by_length and not self.broken:
            self.over = True
            self._parser = None
        else:
            self.lost("closed in the middle of an answer" if self.begun else "closed without an answer")

    def lost(self, why: str) -> None:
        """The connection is gone."""
        self.unanswered = not self.begun
        self.fail(why)

    def fail(self, why: str) -> None:
        """Nothing more will come, and there should."""
        if not self.over and not self.broken:
            self.broken = why
            self._parser = None

    def take(self) -> bytes:
        """What came of the body since this was last called."""
        parts = self._parts
        self._parts = []
        self.waiting = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_message_begin(self) -> None:
        """For the parser."""
        if self.over:
            # It was not asked for: it must not be taken for the next answer, nor for more of this one.
            raise _Enough

    def on_header(self, name: bytes, value: bytes) -> None:
        """For the parser. A trailer comes here too."""
        self._overhead += len(name) + len(value) + 4
        if self._overhead > MOST_OVERHEAD:
            self._refuse("too long a head")
        if self.status:
            return
        match name.lower():
            case b"content-type":
                self.content_type = self.content_type or value.decode("latin-1").strip()
            case b"content-length":
                self._ends_by_length = True
            case b"transfer-encoding":
                # No other was asked for, and the bytes of another would be taken for the body itself.
                if self._chunked or value.strip().lower() != b"chunked":
                    self._refuse("a transfer encoding that was not asked for")
                self._chunked = True

    def on_headers_complete(self) -> None:
        """For the parser."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        elif status < 100 or status == 101:
            self._refuse(f"status {status}")
        else:
            self.content_type = ""
            self._chunked = self._ends_by_length = False

    def on_body(self, data: bytes) -> None:
        """For the parser."""
        self._parts.append(data)
        self.waiting += len(data)
        self._since_part = 0

    def on_message_complete(self) -> None:
        """For the parser."""
        assert self._parser is not None
        if self.status:
            self.over = True
            self.reusable = self._parser.should_keep_alive()

    def _refuse(self, why: str) -> None:
        self.broken = why
        raise _Enough

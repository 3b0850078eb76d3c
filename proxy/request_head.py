"""What a request to a server begins with, as bytes; what is the same for many is put together once."""

import re
from collections.abc import Mapping

from proxy.http_url import Address

_UNSAFE = re.compile(r"[\r\n\0]")

_Key = tuple[str, str, tuple[tuple[str, str], ...], tuple[str, ...]]


class UnsafeHeader(ValueError):
    """A header that would be something else on the wire. It is not quoted: it may be a secret."""


class RequestHeads:
    """The heads of requests to one server."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        """``headers`` are sent with every request, except where it has its own of that name."""
        self._address = address
        self._headers = headers
        self._beginnings: dict[_Key, bytes] = {}
        """There are few: of each path and each rank of the server, with and without what clients have forwarded."""

    def post(
        self, path: str, headers: Mapping[str, str], forwarded: Mapping[str, str], request_id: str, length: int
    ) -> bytes:
        """Of a POST with ``length`` bytes of JSON.

        ``headers`` are the server's own, ``forwarded`` a client's, which replace them; ``request_id`` may be empty.
        Raises ``UnsafeHeader``.
        """
        beginning = self._beginning("POST", path, headers, forwarded)
        own = _line("X-Request-Id", request_id) if request_id else b""
        if forwarded:
            own += b"".join([_line(name, value) for name, value in forwarded.items()])
        return b"%bContent-Length: %d\r\n%b\r\n" % (beginning, length, own)

    def get(self, path: str, headers: Mapping[str, str], forwarded: Mapping[str, str]) -> bytes:
        """Of a GET. As ``post``."""
        own = [_line(name, value) for name, value in forwarded.items()]
        return b"".join([self._beginning("GET", path, headers, forwarded), *own, b"\r\n"])

    def _beginning(self, method: str, path: str, headers: Mapping[str, str], forwarded: Mapping[str, str]) -> bytes:
        key = method, path, tuple(headers.items()), tuple(forwarded)
        if (known := self._beginnings.get(key)) is None:
            known = self._beginnings[key] = self._put_together(method, path, headers, forwarded)
        return known

    def _put_together(self, method: str, path: str, headers: Mapping[str, str], forwarded: Mapping[str, str]) -> bytes:
        lines = {"host": ("Host", self._address.authority), "user-agent": ("User-Agent", "turnback")}
        lines |= {name.lower(): (name, value) for name, value in {**self._headers, **headers}.items()}
        if method == "POST":
            lines["content-type"] = "Content-Type", "application/json"
        for name in forwarded:
            lines.pop(name.lower(), None)
        request_line = f"{method} {self._address.prefix}{path} HTTP/1.1\r\n".encode("ascii")
        return request_line + b"".join([_line(name, value) for name, value in lines.values()])


def _line(name: str, value: str) -> bytes:
    line = f"{name}: {value}"
    if _UNSAFE.search(line):
        raise UnsafeHeader("a header has the end of a line in it")
    try:
        return line.encode("latin-1") + b"\r\n"
    except UnicodeEncodeError:
        raise UnsafeHeader("a header has characters in it that HTTP cannot carry") from None

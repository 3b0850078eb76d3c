"""Whom requests go to, and what each is sent beside its body."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Server(Protocol):
    """Where a request goes: a worker, or a server that only renders."""

    @property
    def url(self) -> str:
        """Without a slash at its end."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request to it carries, besides what requests to all of them do."""


@dataclass(frozen=True)
class Forwarding:
    """A server, and headers of a client's that a request to it carries besides, or instead of, the server's."""

    server: Server
    forwarded: Mapping[str, str]

    @property
    def url(self) -> str:
        """See ``Server``."""
        return self.server.url

    @property
    def headers(self) -> Mapping[str, str]:
        """See ``Server``."""
        return self.server.headers


def forwarding(server: Server, forwarded: Mapping[str, str]) -> Server:
    """``server``, to be sent ``forwarded`` too."""
    if not forwarded:
        return server
    if isinstance(server, Forwarding):
        return Forwarding(server.server, {**server.forwarded, **forwarded})
    return Forwarding(server, forwarded)


@dataclass(frozen=True)
class RenderServer:
    """A server that is no worker, and is sent what all are."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

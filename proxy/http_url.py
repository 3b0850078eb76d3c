"""The address of a server, as the settings have it, and as a request needs it."""

from dataclasses import dataclass

from yarl import URL


@dataclass(frozen=True)
class Address:
    """Where to connect to, and what to say there."""

    host: str
    """A name, or an IP address without brackets."""
    port: int
    tls: bool
    authority: str
    """For the header ``Host``."""
    prefix: str
    """Of every path; without a slash at its end."""

    @classmethod
    def of(cls, text: str) -> "Address":
        """Of the server at ``text``, a URL that ``http_url`` takes."""
        url = URL(text)
        host, port, authority = url.raw_host, url.port, url.host_port_subcomponent
        if host is None or port is None or authority is None:
            raise ValueError("no URL of a server")
        return cls(host, port, url.scheme == "https", authority, url.raw_path.rstrip("/"))


def http_url(text: str, of_what: str) -> URL:
    """``text`` as a URL with nothing behind its path; raises ``ValueError`` if it is none of http(s).

    ``of_what`` is for the message: what it should be a URL of, with an example.
    """
    try:
        url = URL(text)
        port = url.port
    except ValueError:
        port = None
    if port is None or url.scheme not in ("http", "https") or not url.host or url.query_string or url.fragment:
        # Not quoted where it may have a password in it.
        named = "a text with @" if "@" in text else repr(text)
        raise ValueError(f"{named} is no URL of {of_what}")
    return url


def has_credential(url: URL) -> bool:
    """Whether ``url`` names a user or a password: it would show wherever the address does."""
    return url.user is not None or url.password is not None

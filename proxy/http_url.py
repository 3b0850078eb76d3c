"""The address of a server, as the settings have it."""

from yarl import URL


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

"""Which conversation a request belongs to."""

from collections.abc import Mapping, Sequence

import msgspec

from proxy.errors import bad_request
from router.kv_params import Members

LONGEST_ID = 256
"""Characters."""


def conversation_id(sources: Sequence[str], headers: Mapping[str, str], members: Members) -> str | None:
    """The first id that ``sources`` (as in the settings) has; None if none has one.

    Raises ``ApiError`` (400) for one that is no string or too long: it would be silently ignored
    otherwise, and its owner would wonder why nothing is reused.
    """
    for source in sources:
        kind, _, name = source.partition(":")
        found = headers.get(name.lower()) if kind == "header" else _in_body(name, members)
        if found is None or found == "":
            continue
        if not isinstance(found, str):
            raise bad_request(f"The conversation id in {name} must be a string.", name)
        if len(found) > LONGEST_ID:
            raise bad_request(f"The conversation id in {name} is longer than {LONGEST_ID} characters.", name)
        return found
    return None


def _in_body(name: str, members: Members) -> object:
    outer, _, inner = name.partition(".")
    raw = members.get(outer)
    if raw is None:
        return None
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not inner:
        return found
    return found.get(inner) if isinstance(found, dict) else None


def credential(headers: Mapping[str, str]) -> str | None:
    """Who is calling, as the request itself tells; None if it does not. ``headers`` by their names in small letters."""
    return headers.get("authorization") or headers.get("x-api-key")

"""The trace that a client's request belongs to, by the headers of W3C Trace Context."""

import re
from collections.abc import Mapping

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LONGEST_STATE = 512


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that tell it, as they came; empty if there is none, or none that can be understood.

    ``headers`` by their names in small letters.
    """
    parent = headers.get("traceparent")
    if parent is None or _PARENT.fullmatch(parent) is None:
        return {}
    state = headers.get("tracestate", "")
    if not state or len(state) > _LONGEST_STATE or not (state.isascii() and state.isprintable()):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}

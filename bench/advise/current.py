"""What is set now, and who says so: an option, else those who measured, else nobody, and it is the default."""

from __future__ import annotations

from typing import Any

from bench.advise.evidence import Current, Evidence, Origin


def current_of(
    evidence: Evidence, *, ttl: float | None = None, threshold: int | None = None, retained_share: float | None = None
) -> Current:
    """What options tell comes first.

    Of routers that do not agree, what decode must have been started with at least, and the bound that is met first.
    """
    told = evidence.told
    measured: Origin = "bench" if evidence.kind == "bench" else "metrics"
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, option, told_most in (
        ("ttl", ttl, max(told.ttl, default=None)),
        ("threshold", threshold, max(told.threshold, default=None)),
        ("retained_share", retained_share, min(told.retained_share, default=None)),
    ):
        origins[name] = "option" if option is not None else "default" if told_most is None else measured
        if origins[name] != "default":
            values[name] = told_most if option is None else option
    return Current(**values, origins=origins)

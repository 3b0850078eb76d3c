"""All three answers together."""

from __future__ import annotations

from dataclasses import dataclass

from bench.advise.evidence import Current, Evidence
from bench.advise.pays import PaysAdvice, advise_pays
from bench.advise.threshold import ThresholdAdvice, advise_threshold
from bench.advise.ttl import TtlAdvice, advise_ttl


@dataclass(frozen=True)
class Advice:
    """What to set, and whether reuse pays at all."""

    source: str
    current: Current
    pays: PaysAdvice
    ttl: TtlAdvice
    threshold: ThresholdAdvice


def advise(evidence: Evidence, current: Current) -> Advice:
    """From what was seen; ``current`` is what is set now."""
    return Advice(
        source=evidence.source,
        current=current,
        pays=advise_pays(evidence),
        ttl=advise_ttl(evidence, current),
        threshold=advise_threshold(evidence, current),
    )

"""The queries' common shapes. All add up over the routers that were picked, and their processes."""

from __future__ import annotations

from deploy.grafana.board import Query

CURVE = "$__rate_interval"
WHOLE = "$__range"

_PICKED = 'job=~"$job",instance=~"$instance"'


def picked(metric: str, where: str = "") -> str:
    """The series of a metric at the routers that were picked."""
    return f"{metric}{{{_PICKED}{',' if where else ''}{where}}}"


def largest(metric: str, by: str = "") -> str:
    """Of a gauge that each router tells for itself, or for all of them."""
    return f"max{_by(by)}({picked(metric)})"


def smallest(metric: str, by: str = "") -> str:
    """The same, of a bound: who has the smallest keeps the others below it, too."""
    return f"min{_by(by)}({picked(metric)})"


def rate(metric: str, by: str = "", where: str = "", window: str = CURVE) -> str:
    """Per second, of a counter."""
    return f"sum{_by(by)}(rate({picked(metric, where)}[{window}]))"


def increase(metric: str, by: str = "", where: str = "", window: str = WHOLE) -> str:
    """How much a counter grew."""
    return f"sum{_by(by)}(increase({picked(metric, where)}[{window}]))"


def or_zero(expr: str) -> str:
    """0 where there has been nothing yet; of an expression without labels."""
    return f"{expr} or vector(0)"


def share(part: str, whole: str) -> str:
    """No value, rather than NaN, where there is nothing to have a share of."""
    return f"{part} / ({whole} > 0)"


def shares(metric: str, by: str) -> str:
    """Of a counter's rate, what each value of a label has of the whole."""
    return f"{rate(metric, by)} / ignoring ({by}) group_left () ({rate(metric)} > 0)"


def mean(metric: str, by: str = "", where: str = "", window: str = CURVE) -> str:
    """Of a histogram's observations."""
    return share(rate(f"{metric}_sum", by, where, window), rate(f"{metric}_count", by, where, window))


def quantile(of: float, metric: str, by: str = "", where: str = "", window: str = CURVE) -> str:
    """Of a histogram."""
    return f"histogram_quantile({of}, {rate(f'{metric}_bucket', f'{by}, le' if by else 'le', where, window)})"


def quantiles(metric: str, where: str = "") -> tuple[Query, ...]:
    """P50, P95 and P99, as curves."""
    return tuple(Query(quantile(of, metric, where=where), f"P{of * 100:.0f}") for of in (0.5, 0.95, 0.99))


def in_order(expr: str) -> str:
    """Of an expression by context: with a label ``upto`` by which contexts can be sorted."""
    upto = f'label_replace({expr}, "upto", "$1", "context", "(?:<=|>|.*-)([0-9]+)k")'
    return f'label_replace({upto}, "upto", "999", "context", ">.*")'


def saved(by: str = "", window: str = WHOLE, fold: str = "increase") -> str:
    """Seconds of prefill that reuse saved, estimated.

    What a plain leg of like context takes on average in the time shown, less what one that reuses takes, times the
    legs that reuse. A context without plain legs is left out.
    """
    plain, reusing = (
        mean("turnback_prefill_seconds", "context", f'reused="{reused}"', WHOLE) for reused in ("no", "yes")
    )
    legs = picked("turnback_prefill_seconds_count", 'reused="yes"')
    return f"sum{_by(by)}(sum by (context) ({fold}({legs}[{window}])) * ({plain} - {reusing}))"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""

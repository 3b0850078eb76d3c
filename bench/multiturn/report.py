"""The result as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from bench.failure import BenchFailure
from bench.multiturn.plots import outcomes_by_turn, retained_over_time, ttft_by_context, ttft_by_turn
from bench.multiturn.summary import Summary
from bench.multiturn.table import arm_figures, counted, notes, percentiles, times, whole
from bench.result import Result

_TEMPLATE = Path(__file__).with_name("report.html")


def page(result: Result, summary: Summary, problems: Sequence[str]) -> str:
    """The page; ``problems`` are what went wrong, for people."""
    arms = result.arms
    plots = [
        ("TTFT by context, later turns", ttft_by_context(summary, arms)),
        ("TTFT by turn", ttft_by_turn(summary, arms)),
        ("Outcomes by turn" + (", with reuse" if len(arms) > 1 else ""), outcomes_by_turn(summary, arms[-1])),
        ("Tokens that decode holds for next turns", retained_over_time(result.retained)),
    ]
    errors = Counter(turn.error for turn in result.turns if turn.error is not None)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        result=result,
        summary=summary,
        arms=arms,
        names={arm: f"reuse {arm}" if len(arms) > 1 else arm for arm in arms},
        problems=problems,
        notes=notes(summary),
        figures=list(zip(*(arm_figures(row) for row in summary.arms), strict=True)),
        # Made here, by matplotlib; worker names in it are escaped there.
        plots=[(title, Markup(plot)) for title, plot in plots if plot is not None],
        errors=errors.most_common(),
        percentiles=percentiles,
        counted=counted,
        times=times,
        whole=whole,
    )


def write(path: Path, text: str) -> None:
    """Write the page to ``path``. Raises ``BenchFailure``, naming it, if that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchFailure(f"cannot write {path}: {error.strerror}") from error

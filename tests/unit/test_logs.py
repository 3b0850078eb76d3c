"""Lines that are made of members at hand look like all others."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import structlog

from proxy.logs import Lines, set_up_logging
from proxy.settings import Settings
from router.reuse import Outcome

MEMBERS = {"request_id": "r", "outcome": Outcome.HIT, "turn": 2, "prompt_tokens": None, "seconds": 0.25}


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def written(format_: str = "json", level: str = "info") -> io.StringIO:
    """Where lines go from now on."""
    stream = io.StringIO()
    settings = Settings.model_validate(
        {"prefill": ["http://p"], "decode": ["http://d"], "log_format": format_, "log_level": level}
    )
    set_up_logging(settings, stream)
    return stream


def test_a_line_is_there_at_once_and_says_what_a_logger_says() -> None:
    stream = written()
    structlog.get_logger().info("turn", **MEMBERS)
    Lines().info("turn", dict(MEMBERS))
    logged, line = [json.loads(text) for text in stream.getvalue().splitlines()]
    for told in (logged, line):
        at = datetime.fromisoformat(told.pop("timestamp"))
        assert timedelta(0) <= datetime.now(UTC) - at < timedelta(minutes=1)
    assert line == logged == MEMBERS | {"event": "turn", "level": "info"}


def test_a_line_has_what_is_bound_to_its_context() -> None:
    stream = written()
    with structlog.contextvars.bound_contextvars(trace_id="t"):
        Lines().info("turn", dict(MEMBERS))
    assert json.loads(stream.getvalue())["trace_id"] == "t"


def test_lines_are_for_people_where_that_is_set() -> None:
    stream = written("console")
    Lines().info("turn", dict(MEMBERS))
    (line,) = stream.getvalue().splitlines()
    assert "turn" in line
    assert "outcome=hit" in line


def test_no_line_is_written_below_the_level_that_is_set() -> None:
    stream = written(level="warning")
    Lines().info("turn", dict(MEMBERS))
    assert not stream.getvalue()


def test_what_json_has_no_form_for_is_written_all_the_same() -> None:
    stream = written()
    structlog.get_logger().warning("odd", what={1, 2}.union)
    assert "built-in method" in json.loads(stream.getvalue())["what"]


@pytest.mark.parametrize("format_", ["json", "console"])
def test_exception_that_a_library_logs_is_told_with_its_traceback(format_: str) -> None:
    stream = written(format_)
    try:
        raise LookupError("of a library")
    except LookupError:
        logging.getLogger("uvicorn.error").exception("it failed")
    told = stream.getvalue()
    if format_ == "json":
        line = json.loads(told)
        assert "exc_info" not in line
        told = line["exception"]
    assert "Traceback (most recent call last):" in told
    assert "in test_exception_that_a_library_logs_is_told_with_its_traceback" in told
    assert "LookupError: of a library" in told

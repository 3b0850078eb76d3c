"""How log lines look, and where they go."""

import logging
import sys
from collections.abc import Callable
from typing import TextIO

import msgspec
import structlog

from proxy.settings import Settings


def set_up_logging(settings: Settings, stream: TextIO | None = None) -> None:
    """Structured lines on ``stream`` (standard error), uvicorn's own included."""
    stream = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not stream.isatty())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(_json)
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            # The pretty one shows local variables: prompts and keys.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    level = getattr(logging, settings.log_level.upper())
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer] if as_json else [*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    # It tells of every change in the folder, whether it concerns the config file or not.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)


def _json(event: structlog.typing.EventDict, default: Callable[[object], object]) -> str:
    """A line for each turn: the standard library's encoder takes several times as long."""
    return msgspec.json.encode(event, enc_hook=default).decode()

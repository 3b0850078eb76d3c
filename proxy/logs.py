"""How log lines look, and where they go."""

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec
import structlog

from proxy.settings import Settings


def set_up_logging(settings: Settings, stream: TextIO | None = None) -> None:
    """Structured lines on ``stream`` (standard error), uvicorn's own included."""
    stream = stream or sys.stderr
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _stamp if as_json else structlog.processors.TimeStamper(fmt="iso"),
    ]
    console = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(),
        # The pretty one shows local variables: prompts and keys.
        exception_formatter=structlog.dev.plain_traceback,
    )
    rendering: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, _json] if as_json else [console]
    )
    level = getattr(logging, settings.log_level.upper())
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
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


class Lines:
    """A logger for what is told often, and has its members at hand as a whole: keywords are copied at every step."""

    def __init__(self) -> None:
        """Lines look, and go, as logging is set up by now."""
        config = structlog.get_config()
        self._processors: list[structlog.typing.Processor] = config["processors"]
        self._logger: structlog.typing.WrappedLogger = config["logger_factory"]()
        self._wanted: bool = structlog.get_logger().is_enabled_for(logging.INFO)

    def info(self, event: str, members: dict[str, object]) -> None:
        """The line that another logger would make of ``members``, which are the caller's no more."""
        if not self._wanted:
            return
        members["event"] = event
        line: structlog.typing.ProcessorReturnValue = members
        for process in self._processors:
            line = process(self._logger, "info", line)  # type: ignore[arg-type]
        self._logger.info(line)


def _stamp(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """When it is, for ``_json`` to write as ISO 8601."""
    event["timestamp"] = datetime.now(UTC)
    return event


def _json(_: object, __: str, event: structlog.typing.EventDict) -> str:
    """A line for each turn: the standard library's encoder takes several times as long."""
    return _encoder.encode(event).decode()


_encoder = msgspec.json.Encoder(enc_hook=repr)

"""Reads the settings: the command line, the environment and the YAML file, and what is wrong with them in one line."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from proxy.settings import Settings


class WrongSettings(Exception):
    """Settings that cannot be used; the message is one line and names the setting."""


def load(arguments: Sequence[str]) -> Settings:
    """The settings that ``arguments`` (of ``turnback serve``), environment and YAML file give.

    Raises ``WrongSettings``; ends the process for ``--help`` and unknown options, as argparse does.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config or os.environ.get("TURNBACK_CONFIG")
    values = {} if path is None else _yaml(Path(path))
    try:
        settings = CliApp.run(Settings, cli_args=_joined(arguments), **values)
        return settings.read_from(arguments)
    except ValidationError as error:
        raise WrongSettings("; ".join(dict.fromkeys(_one_line(found) for found in error.errors()))) from error
    except SettingsError as error:
        raise WrongSettings(" ".join(str(error).split())) from error


def _joined(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with each list option once: ``--prefill A --prefill B`` means both, as ``--prefill A B`` does."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("prefill", "decode", "conversation_id_sources"):
        finder.add_argument(f"--{name.replace('_', '-')}", dest=name, action="extend", nargs="*")
    lists, others = finder.parse_known_args(arguments)
    for name, values in vars(lists).items():
        if values is not None:
            others += [f"--{name.replace('_', '-')}", *values]
    return others


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise WrongSettings(f"config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WrongSettings(f"config: {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise WrongSettings(f"config: {path} must hold settings by name (prefill: …)")
    for key in content:
        if key not in Settings.model_fields or key == "config":
            raise WrongSettings(f"{key}: no such setting (in {path})")
    return content


def _one_line(found: Any) -> str:
    message = found["msg"].removeprefix("Value error, ")
    place = ".".join(str(part) for part in found["loc"])
    return f"{place}: {message}" if place else message

"""The ``turnback`` command."""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing.context import SpawnProcess

from proxy.server import serve_alone, serve_as_child, uvicorn_config
from proxy.settings import Settings
from proxy.settings_load import WrongSettings, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code (2 for wrong settings)."""
    parser = argparse.ArgumentParser(prog="turnback", description="Prefill reuses what decode retained.")
    parser.add_argument("--version", action="version", version=f"turnback {version('turnback')}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="run the proxy (turnback serve --help)", add_help=False)
    commands.add_parser(
        "bench", help="measure a server, with and without reuse (turnback bench --help)", add_help=False
    )
    commands.add_parser("advise", help="say what to set, and whether reuse pays", add_help=False)
    chosen, rest = parser.parse_known_args(arguments)
    if chosen.command == "bench":
        return _bench(rest)
    if chosen.command == "advise":
        return _advise(rest)
    try:
        settings = load(rest)
    except WrongSettings as error:
        print(f"turnback: wrong setting: {error}", file=sys.stderr)
        return 2
    return _serve(settings)


def _bench(arguments: Sequence[str]) -> int:
    # Not imported at the top: only the extra `bench` brings what it needs.
    try:
        from bench.multiturn.command import main as bench
    except ModuleNotFoundError as error:
        print(f"turnback bench: {error.name} is missing: pip install 'turnback[bench]'", file=sys.stderr)
        return 2
    return bench(arguments)


def _advise(arguments: Sequence[str]) -> int:
    # Not imported at the top: only the extra `bench` brings what it needs.
    try:
        from bench.advise.command import main as advise
    except ModuleNotFoundError as error:
        print(f"turnback advise: {error.name} is missing: pip install 'turnback[bench]'", file=sys.stderr)
        return 2
    return advise(arguments)


def _serve(settings: Settings) -> int:
    if settings.workers == 1:
        return serve_alone(settings)
    # The processes add their metrics up through files in a folder that prometheus-client takes from here.
    with tempfile.TemporaryDirectory(prefix="turnback-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        return _serve_by_several(settings)


def _serve_by_several(settings: Settings) -> int:
    # Not imported at the top: prometheus-client looks for its folder when it is imported.
    from proxy.logs import set_up_logging
    from proxy.supervisor import supervise

    set_up_logging(settings)
    spawn = multiprocessing.get_context("spawn")
    with uvicorn_config(settings, None).bind_socket() as listening:

        def start() -> SpawnProcess:
            process = spawn.Process(target=serve_as_child, args=(settings, listening))
            process.start()
            return process

        return supervise(start, settings.workers)


if __name__ == "__main__":
    sys.exit(main())

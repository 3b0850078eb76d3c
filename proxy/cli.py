"""The ``turnback`` command."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from proxy.settings import Settings, WrongSettings, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code (2 for wrong settings)."""
    parser = argparse.ArgumentParser(prog="turnback", description="Prefill reuses what decode retained.")
    parser.add_argument("--version", action="version", version=f"turnback {version('turnback')}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="run the proxy (turnback serve --help)", add_help=False)
    _, rest = parser.parse_known_args(arguments)
    try:
        settings = load(rest)
    except WrongSettings as error:
        print(f"turnback: wrong setting: {error}", file=sys.stderr)
        return 2
    return _serve(settings)


def _serve(settings: Settings) -> int:
    if settings.workers == 1:
        server = uvicorn.Server(_uvicorn(settings))
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
        return 0 if server.started else 1
    # The processes add their metrics up through files in a folder that prometheus-client takes from here.
    with tempfile.TemporaryDirectory(prefix="turnback-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        config = _uvicorn(settings)
        with contextlib.suppress(KeyboardInterrupt):
            Multiprocess(config, sockets=[config.bind_socket()]).run()
    return 0


def _uvicorn(settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        partial(_create_app, settings),
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        loop="uvloop",
        http="httptools",
        timeout_keep_alive=75,
    )


def _create_app(settings: Settings) -> FastAPI:
    # Not imported at the top: prometheus-client looks for its folder when it is imported.
    from proxy.app import create_app

    return create_app(settings)


if __name__ == "__main__":
    sys.exit(main())

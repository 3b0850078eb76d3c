"""One process of the proxy: serves until it is told to end, and then until its turns are over."""

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import socket
import sys
from types import FrameType

import structlog
import uvicorn

from proxy.drain import Drain
from proxy.settings import Settings

log = structlog.get_logger()

_FAREWELL_SECONDS = 3.0
"""For what clients have not read yet when all turns are over."""


class DrainingServer(uvicorn.Server):
    """Ends by a drain when it is told to, and goes on accepting connections until the turns are over.

    So a load balancer sees 503 on ``/ready``, and not a closed port, while there is still something to wait for.
    Being told again changes nothing.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, patience: float) -> None:
        """``patience``: seconds that running turns have."""
        super().__init__(config)
        self._drain = drain
        self._patience = patience
        self._told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the event loop's thread, so it only leaves word."""
        self._told = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop, asked ten times a second."""
        if self._told and not self._drain.began:
            log.info("told to end: no new turns", running=self._drain.running, within=self._patience)
            self._drain.begin(self._patience)
        over = self._drain.began and not self._drain.running
        return await super().on_tick(counter) or over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections; let clients that read slowly have the rest of their answers, in time."""
        self.config.timeout_graceful_shutdown = math.ceil(max(_FAREWELL_SECONDS, self._drain.left))
        await super().shutdown(sockets)


class LoneServer(DrainingServer):
    """The only process: being told twice, it is gone at once, and the turns with it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See ``DrainingServer``."""
        if self._told:
            # Whoever insists does not want to wait for anybody's clean-up either.
            os._exit(1)
        super().handle_exit(sig, frame)


class ChildServer(DrainingServer):
    """One of several processes. Being told twice is usual: by its parent, and by whoever tells a whole group.

    It ends too when its parent is gone: nobody would tell it any more.
    """

    async def on_tick(self, counter: int) -> bool:
        """See ``DrainingServer``."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            self._told = True
        return await super().on_tick(counter)


def serve_alone(settings: Settings) -> int:
    """Serve in this process; its exit code: 0 after a drain, 1 if it never began."""
    return _serve(settings, LoneServer, None)


def serve_as_child(settings: Settings, listening: socket.socket) -> None:
    """Serve in this process, one of several that share ``listening``, and exit it as ``serve_alone`` would."""
    # Ctrl-C in a terminal reaches every process; the parent passes it on in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(_serve(settings, ChildServer, [listening]))


def uvicorn_config(settings: Settings, app: object) -> uvicorn.Config:
    """How the proxy is served."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        loop="uvloop",
        http="httptools",
        timeout_keep_alive=75,
    )


def _serve(settings: Settings, kind: type[DrainingServer], listening: list[socket.socket] | None) -> int:
    # Not imported at the top: prometheus-client looks for its folder when it is imported.
    from proxy.app import create_app

    allow_many_files()
    drain = Drain()
    server = kind(uvicorn_config(settings, create_app(settings, drain=drain)), drain, settings.drain_timeout)
    server.run(listening)
    return 0 if server.started else 1


def allow_many_files() -> None:
    """A running stream takes two connections, and the usual limit of 1,024 files is soft: raise it to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems tell a hard limit that they do not grant.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

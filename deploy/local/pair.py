"""One prefill and one decode engine on this machine, for `make serve`, end-to-end tests and benches.

with Pair() as pair:
    pair.wait_ready()
    use(pair.prefill.url, pair.decode.url)
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.local.failure import LocalFailure
from deploy.local.layout import Layout
from deploy.local.options import EngineOptions, Role, command, environment
from deploy.local.ports import LOOPBACK, free_port
from deploy.local.process import Process

READY_SECONDS = 300.0
PROBE_SECONDS = 0.25


class Engine:
    """One vLLM server. Ports and log stay the same over restarts."""

    def __init__(self, options: EngineOptions, layout: Layout | None = None, avoid: Collection[int] = ()) -> None:
        """Choose ports, none of them in `avoid`; nothing runs yet. `setup.ensure` builds what it needs."""
        self.options = options
        self._layout = layout or Layout.default()
        self.port = options.port or free_port(avoid)
        self.side_channel_port = options.side_channel_port or free_port(
            (self.port, *avoid), beside=range(1, options.data_parallel_size)
        )
        self.core = _core(options)
        self.log: Path = self._layout.logs / f"{options.role}-{self.port}.log"
        self._process: Process | None = None

    @property
    def role(self) -> Role:
        return self.options.role

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, the leader of its own process group."""
        return self._running().pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs or was never started; 128 + n if signal n ended it."""
        return self._process.exit_code if self._process else None

    def start(self) -> None:
        """Start it and return at once. Its log begins anew."""
        if not self._layout.engine_python.exists():
            raise LocalFailure("The engines' environment is not built: python -m deploy.local setup")
        self.log.unlink(missing_ok=True)
        self._launch()

    def is_ready(self) -> bool:
        """Whether /health answers 200 now. Raises `LocalFailure` if the process has ended."""
        if self._running().exit_code is not None:
            raise LocalFailure(f"The {self.role} engine ended with code {self.exit_code}.", self.log)
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Return when it answers. Raises `LocalFailure`, with its log's end, if it does not."""
        wait_all_ready([self], timeout)

    def stop(self) -> None:
        """End it and all it started: SIGTERM, SIGKILL after ten seconds. Harmless when it is not running."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """SIGKILL to the whole process group, as a crash would look. Returns when it is gone."""
        self._running().kill()

    def restart(self) -> None:
        """Stop it if it runs, and start it again on the same ports. Its log goes on. Does not wait."""
        self.stop()
        self._launch()

    def ask_to_stop(self) -> None:
        """Begin to stop, and return at once."""
        if self._process is not None:
            self._process.ask_to_stop()

    def _launch(self) -> None:
        self._process = Process(
            self.role,
            command(self.options, self._layout, self.port),
            log=self.log,
            env=environment(self.options, self.side_channel_port, self.core),
            core=self.core,
        )

    def _running(self) -> Process:
        if self._process is None:
            raise LocalFailure(f"The {self.role} engine was not started.")
        return self._process


class Pair:
    """A prefill and a decode engine. Entering starts both, leaving stops both."""

    def __init__(
        self,
        prefill: EngineOptions | None = None,
        decode: EngineOptions | None = None,
        layout: Layout | None = None,
    ) -> None:
        prefill, decode = prefill or EngineOptions("prefill"), decode or EngineOptions("decode")
        given = [port for side in (prefill, decode) for port in (side.port, side.side_channel_port) if port]
        self.prefill = Engine(prefill, layout, given)
        chosen = [self.prefill.port, self.prefill.side_channel_port]
        self.decode = Engine(decode, layout, [*given, *chosen])

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return (self.prefill, self.decode)

    def start(self) -> None:
        """Start both and return at once."""
        for engine in self.engines:
            engine.start()

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """Return when both answer. Raises `LocalFailure` as soon as one has ended."""
        wait_all_ready(self.engines, timeout)

    def stop(self) -> None:
        """End both, at the same time."""
        for engine in self.engines:
            engine.ask_to_stop()
        for engine in self.engines:
            engine.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def wait_all_ready(engines: Sequence[Engine], timeout: float = READY_SECONDS) -> None:
    """Return when all answer. Raises `LocalFailure` as soon as one has ended, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    waiting = list(engines)
    while waiting := [engine for engine in waiting if not engine.is_ready()]:
        if time.monotonic() > deadline:
            raise LocalFailure(f"The {waiting[0].role} engine did not answer within {timeout:.0f} s.", waiting[0].log)
        time.sleep(PROBE_SECONDS)


def _core(options: EngineOptions) -> int:
    """The core asked for, or one per role, as far as this process may use two."""
    if options.core is not None:
        return options.core
    cores = sorted(os.sched_getaffinity(0))
    return cores[0] if options.role == "prefill" else cores[min(1, len(cores) - 1)]

"""A child process with a log, pinned to a core, that cannot outlive this process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.failure import LocalFailure

WARDEN = Path(__file__).with_name("warden.py")
# Beyond the warden's own grace, which ends in SIGKILL.
EXTRA_SECONDS = 5.0


class Process:
    """One run of a command under the warden (see `warden.py`)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        core: int | None = None,
        grace: float = 10.0,
    ) -> None:
        """Start it. Output goes to the end of `log`. `stop` allows it `grace` seconds."""
        self.name = name
        self.log = log
        self._grace = grace
        log.parent.mkdir(parents=True, exist_ok=True)
        status, status_of_child = os.pipe()
        where = "-" if core is None else str(core)
        warden = [sys.executable, "-I", str(WARDEN), where, str(grace), str(status_of_child), *command]
        try:
            with log.open("ab") as output:
                output.write(f"$ {shlex.join(command)}\n".encode())
                output.flush()
                self._warden = subprocess.Popen(
                    warden,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=cwd,
                    pass_fds=(status_of_child,),
                    # Ctrl-C on the terminal reaches us alone; we end the rest in order.
                    start_new_session=True,
                )
        finally:
            os.close(status_of_child)
        with open(status) as file:
            pid = file.readline().strip()
        if not pid:
            self._warden.wait()
            raise LocalFailure(f"{name} could not be started.", log)
        self.pid = int(pid)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n if signal n ended it."""
        return self._warden.poll()

    def stop(self) -> None:
        """End it and everything it started: SIGTERM, SIGKILL after the grace. Returns when it is gone."""
        self._signal(signal.SIGTERM)
        try:
            self._warden.wait(self._grace + EXTRA_SECONDS)
        except subprocess.TimeoutExpired:
            self._warden.kill()
        self._close()

    def ask_to_stop(self) -> None:
        """Begin what `stop` does, and return at once."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of it, as a crash would look. Returns when it is gone."""
        self._signal(signal.SIGUSR1)
        self._close()

    def _signal(self, number: signal.Signals) -> None:
        if self._warden.poll() is None:
            self._warden.send_signal(number)

    def _close(self) -> None:
        self._warden.wait()
        if self._warden.stdin is not None:
            self._warden.stdin.close()

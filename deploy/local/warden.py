"""Run a command and see to it that nothing of it outlives whoever asked for it.

Used as a script: `warden.py CORE GRACE STATUS_FD COMMAND...`. Its standard input is a pipe nobody
writes to: when it closes, the owner is gone, however it died, and the command is ended.

- SIGTERM, or the end of standard input: SIGTERM to the command's process group, SIGKILL to what is
  left of it after GRACE seconds.
- SIGUSR1: SIGKILL to the group at once (how tests crash an engine).
- The command ends by itself: what is left of its group is ended the same way.

The warden exits with the command's exit code, or 128 + the signal that ended it. CORE pins the
command and all its children (`-` does not). The command's pid is written to STATUS_FD.

A parent-death signal alone would not do: it is sent when the *thread* that started the child ends,
and reaches the child only, not the child's children.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def run(core: str, grace: float, status_fd: int, command: Sequence[str]) -> int:
    """Run `command` as the module says; return its exit code."""
    libc = ctypes.CDLL(None)
    # Children whose parent dies become ours, so that they can be found and ended.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    # Signals arrive as bytes in a pipe, to be waited for together with standard input.
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # For the case that the warden itself is killed.
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    os.write(status_fd, f"{child.pid}\n".encode())
    os.close(status_fd)
    force = False
    while child.poll() is None:
        _reap(child)
        ready, _, _ = select.select([0, wake], [], [])
        signals = os.read(wake, 64) if wake in ready else b""
        force = signal.SIGUSR1 in signals
        if force or 0 in ready or signal.SIGTERM in signals or signal.SIGINT in signals:
            break
    _end_group(child, 0.0 if force else grace)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _end_group(child: subprocess.Popen[bytes], grace: float) -> None:
    if grace:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and _group_lives(child):
            time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # What left the group has become our child by now.
    while strays := _children(os.getpid()):
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(child)
        time.sleep(0.01)


def _group_lives(child: subprocess.Popen[bytes]) -> bool:
    _reap(child)
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collect what has ended: the command through its object, adopted children directly."""
    child.poll()
    for pid in _children(os.getpid()):
        if pid != child.pid:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))

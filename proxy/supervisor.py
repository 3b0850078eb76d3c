"""Several processes as one: started, started again when they die, and ended together."""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

import structlog
from prometheus_client.multiprocess import mark_process_dead

log = structlog.get_logger()

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def supervise(start: Callable[[], SpawnProcess], count: int) -> int:
    """Keep ``count`` processes running until SIGINT or SIGTERM, then have them drain; the exit code.

    A second signal kills them. One that was killed is replaced; one that gave up by itself ends all, as another
    would fare no better. 1 if one gave up or was cut short.
    """
    with _signals() as told:
        running = [start() for _ in range(count)]
        ending = failed = False
        while running:
            ready = wait([told, *(process.sentinel for process in running)])
            for _ in told.recv(64) if told in ready else b"":
                for process in running:
                    process.kill() if ending else process.terminate()
                ending = True
            for process in [process for process in running if not process.is_alive()]:
                running.remove(process)
                code = _gone(process)
                if ending:
                    # Told before it had begun to listen for it.
                    failed = failed or code not in (0, -signal.SIGTERM)
                elif code > 0:
                    log.error("a process gave up: all are ended", process=process.pid, code=code)
                    ending = failed = True
                    for other in running:
                        other.terminate()
                else:
                    log.error("a process died: another is started", process=process.pid, code=code)
                    running.append(start())
    return 1 if failed else 0


def _gone(process: SpawnProcess) -> int:
    """Its exit code; negative for the signal that killed it."""
    process.join()
    if process.pid is not None:
        # Else what it was doing when it died would be counted as running for good.
        mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
    return process.exitcode or 0


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket from which a byte can be read for each signal that came."""
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        before = {sig: signal.signal(sig, lambda *_: None) for sig in _SIGNALS}
        woken = signal.set_wakeup_fd(writing.fileno())
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(woken)
            for sig, handler in before.items():
                signal.signal(sig, handler)

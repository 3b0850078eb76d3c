"""The command, running in a process of its own, or in several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.local.ports import free_port
from tests.processes import children, command_line
from tests.running import GENEROUS, eventually
from tests.simulator import Cluster, SimEngine


@dataclass
class Command:
    """`turnback serve`, running."""

    url: str
    process: asyncio.subprocess.Process
    decode: SimEngine
    said: list[str] = field(default_factory=list)

    def tell(self, sig: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(sig)

    async def exit_code(self, within: float = GENEROUS) -> int:
        return await asyncio.wait_for(self.process.wait(), within)


@contextlib.asynccontextmanager
async def serving(*arguments: str, **engines: Any) -> AsyncIterator[Command]:
    """The command in front of two simulators with the options ``engines``, ready."""
    async with Cluster() as cluster:
        prefill, decode = await cluster.start("p", **engines), await cluster.start("d", **engines)
        url = f"http://127.0.0.1:{(port := free_port())}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy.cli", "serve", "--prefill", prefill.url, "--decode", decode.url,
            "--port", str(port), "--probe-interval", "0.1", *arguments,
            env={name: value for name, value in os.environ.items() if not name.startswith("TURNBACK_")},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        command = Command(url, process, decode)
        listening = asyncio.create_task(_listen(command))
        try:
            await eventually(lambda: is_ready(command))
            yield command
            assert not re.search("Traceback", "".join(command.said)), "".join(command.said)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await listening


async def _listen(command: Command) -> None:
    assert command.process.stdout is not None
    async for line in command.process.stdout:
        command.said.append(line.decode())


async def is_ready(command: Command) -> bool:
    """Whether it can serve; fails if it has ended."""
    assert command.process.returncode is None, "".join(command.said)
    status, _ = await ready(command)
    return status == 200


async def ready(command: Command) -> tuple[int, Any]:
    """The answer of `/ready`, on a connection of its own; status 0 if nobody listens."""
    async with httpx.AsyncClient(timeout=GENEROUS) as client:
        try:
            response = await client.get(f"{command.url}/ready")
        except httpx.TransportError:
            return 0, None
        return response.status_code, response.json()


def serving_children(command: Command) -> set[int]:
    """Without the process by which Python's multiprocessing cleans up."""
    lines = {pid: command_line(pid) for pid in children(command.process.pid)}
    return {pid for pid, line in lines.items() if line and "resource_tracker" not in line}

"""A simulated vLLM server: the handle a test holds."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiohttp import web

from deploy.local.ports import free_port

from .answers import full_answer
from .core import Core
from .faults import Fault, Faults, Point, Predicate
from .options import Options
from .prepare import prepare
from .recording import Recorded
from .retention import Held, Retention
from .server import Server
from .validation import check

if TYPE_CHECKING:
    from .cluster import Cluster

Json = dict[str, Any]

_side_channels = itertools.count(5600)


def _any(_: Recorded) -> bool:
    return True


class SimEngine:
    """One vLLM server on a free loopback port. Prefill or decode is what it is asked to do.

    `requests` are the POSTs it was sent, oldest first; `probes` all other requests.
    """

    def __init__(self, cluster: Cluster, name: str, options: Options | None = None) -> None:
        self.cluster = cluster
        self.name = name
        self.options = options or Options()
        self.options.check()
        self.requests: list[Recorded] = []
        self.probes: list[Recorded] = []
        self.faults = Faults()
        self.pause_stream: asyncio.Event | None = None
        self.generation = 0
        self.start_time = time.time() - 1_000.0
        self.partitioned = False
        self.alive = False
        self.busy = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._side_channel = next(_side_channels)
        # One of the system's choice could be given to somebody else while this is stopped or partitioned.
        self._port = free_port()
        self._runner: web.AppRunner | None = None
        self.core = self._new_core()
        cluster.engines.append(self)

    # --- life ----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens, or listened; the port stays the same over restarts."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def engine_id(self) -> str:
        return self.core.engine_id

    async def start(self) -> None:
        """Begin to listen, as a new process if there was one before."""
        if self.alive:
            return
        if self.generation:
            self.core = self._new_core()
            self.start_time += 10.0
        self.generation += 1
        self.alive = True
        await self._listen()

    async def stop(self) -> None:
        """The process is gone: connections break, the port refuses, all KV is lost."""
        if not self.alive:
            return
        self.alive = False
        self.core.crashed = "stopped"
        await self._unlisten()

    async def restart(self) -> None:
        """A new process on the same port: new engine id, nothing retained, a later start time."""
        await self.stop()
        await self.start()

    async def partition(self) -> None:
        """Out of reach for clients and other engines, but alive: what it holds stays held."""
        self.partitioned = True
        await self._unlisten()

    async def heal(self) -> None:
        """In reach again."""
        self.partitioned = False
        await self._listen()

    async def __aenter__(self) -> SimEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _new_core(self) -> Core:
        return Core(self.cluster, self.name, self.options, f"sim-{self.name}", self._side_channel)

    async def _listen(self) -> None:
        self._runner = web.AppRunner(
            Server(self).application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.05
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def _unlisten(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if runner.server is not None:
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()

    # --- faults -----------------------------------------------------------------------------------

    def fail_next(
        self,
        *,
        status: int = 500,
        times: int = 1,
        when: Predicate = _any,
        body: Json | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Answer with an error instead of doing anything."""
        fault = Fault("fail", when, times, status=status, body=body, headers=headers or {})
        self.faults.order(fault)

    def hang_next(
        self,
        point: Point = "before_headers",
        *,
        times: int = 1,
        when: Predicate = _any,
        events: int = 1,
    ) -> None:
        """Stop answering at a point and keep the connection, until the client hangs up."""
        self.faults.order(Fault("hang", when, times, point=point, events=events))

    def close_next(
        self,
        point: Point = "before_headers",
        *,
        times: int = 1,
        when: Predicate = _any,
        events: int = 1,
    ) -> None:
        """Drop the connection at a point."""
        self.faults.order(Fault("close", when, times, point=point, events=events))

    def error_next(self, *, times: int = 1, when: Predicate = _any, events: int = 1, body: Json | None = None) -> None:
        """After so many events of a stream send an error event, then `[DONE]`, and abort."""
        self.faults.order(Fault("error_event", when, times, "mid_stream", events, body=body))

    async def pass_gate(self) -> None:
        """Wait for `pause_stream`, if there is one: each `set()` lets one event pass."""
        gate = self.pause_stream
        if gate is not None:
            await gate.wait()
            gate.clear()

    # --- what it holds ------------------------------------------------------------------------------

    @property
    def retained(self) -> list[Retention]:
        """Finished turns kept for a next one (not what is leased to decode), oldest first."""
        self.core.memory.reap()
        return [kept for kept in self.core.memory.retentions.values() if kept.kind == "retained"]

    @property
    def leased(self) -> list[Retention]:
        """Prefilled prompts kept for decode, oldest first."""
        self.core.memory.reap()
        return [kept for kept in self.core.memory.retentions.values() if kept.kind == "leased"]

    def held(self) -> Held:
        """Blocks that are not free, and who holds them; falsy if none are."""
        return self.core.memory.held(self.core.running)

    async def settle(self, *, within: float = 2.0) -> None:
        """Wait until no request is being handled any more; `TimeoutError` if that takes longer."""
        await asyncio.wait_for(self.idle.wait(), within)

    # --- what would be right -----------------------------------------------------------------------------

    async def cold_answer(self, body: Json, *, path: str = "/v1/chat/completions") -> Json:
        """What this engine would answer if it had to compute everything itself.

        The whole answer of the request without streaming, with token ids. Touches nothing.
        """
        from .cluster import Cluster

        alone = json.loads(json.dumps(body))
        for name in ("kv_transfer_params", "stream", "stream_options", *self.options.forbidden_members):
            alone.pop(name, None)
        alone["return_token_ids"] = True
        chat = path == "/v1/chat/completions"
        check(alone, self.options, chat=chat)
        core = Core(Cluster(), "cold", self.options, "nowhere", 0)
        return await full_answer(core, prepare(alone, self.options, chat=chat, header_id=None))

"""Several prefill and decode simulators, a proxy in front, and what must be true after whatever happened."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx

from proxy.settings import Settings
from tests.contract.answers import CHAT, OPENING, chat, message_of, user
from tests.contract.conftest import Said
from tests.running import GENEROUS, Running, eventually, running
from tests.simulator import Cluster, Fault, Recorded, SimEngine

Json = dict[str, Any]

LEASE = 31.0
"""Seconds after which prefill has given up what decode never read."""
TTL = 481.0
"""Seconds after which decode has given up what it retained."""
_SETTLED_WITHIN = 10.0
_names = itertools.count()
_ID_OF_A_LEG = "X-Request-Id"
"""Carried by every leg of a turn and every release, and by none of the questions about a worker's abilities."""


def prefills(request: Recorded) -> bool:
    """Whether this is a turn's prefill leg. (A probe has no body to look at.)"""
    return request.method == "POST" and request.is_prefill and not request.is_release and _of_a_turn(request)


def reuses(request: Recorded) -> bool:
    """Whether this is a prefill leg that reads retained blocks."""
    return prefills(request) and bool(request.kv and request.kv.get("remote_block_ids"))


def decodes(request: Recorded) -> bool:
    """Whether this is a decode leg."""
    return request.method == "POST" and request.is_decode


def renders(request: Recorded) -> bool:
    """Whether this asks for a prompt's token ids."""
    return request.path.endswith("/render")


def releases(request: Recorded) -> bool:
    """Whether this gives blocks back."""
    return request.method == "POST" and request.is_release


def asks_health(request: Recorded) -> bool:
    """Whether this is a health probe."""
    return request.path == "/health"


def _of_a_turn(request: Recorded) -> bool:
    return _ID_OF_A_LEG in request.headers


class Once:
    """Holds for the first such request, whichever of several workers it comes to."""

    def __init__(self, when: Callable[[Recorded], bool]) -> None:
        self._when = when
        self._happened = False

    def __call__(self, request: Recorded) -> bool:
        if self._happened or not self._when(request):
            return False
        self._happened = True
        return True


def at_request(
    engines: Collection[SimEngine], when: Callable[[Recorded], bool], do: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Do something at the moment at which the first such request has come, before it is computed."""
    begun: list[asyncio.Task[None]] = []

    def see(request: Recorded) -> bool:
        if not begun and when(request):
            begun.append(asyncio.ensure_future(do()))
        return False

    for engine in engines:
        engine.faults.order(Fault("fail", see))


@dataclass
class Fleet:
    """The workers, and one proxy."""

    cluster: Cluster
    prefill: list[SimEngine]
    decode: list[SimEngine]
    proxy: Running
    conversations: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    """Turns whose clients hung up, by the name of the user in their bodies."""

    @property
    def engines(self) -> list[SimEngine]:
        """All."""
        return [*self.prefill, *self.decode]

    @property
    def several(self) -> bool:
        """Whether another worker can take over."""
        return len(self.decode) > 1

    async def say(self, body: Json, conversation: str = "c") -> Said:
        """One turn; fails unless its answer is complete and, token for token, that of a cold prefill."""
        said = await self.ask(body, conversation)
        assert said.response.status_code == 200, said.response.text
        truth = message_of(await self.decode[0].cold_answer(body), CHAT)
        assert said.message == truth, (said.outcome, said.reason)
        return said

    async def ask(self, body: Json, conversation: str = "c") -> Said:
        """One turn, whatever comes of it."""
        self.conversations.add(conversation)
        headers = {"x-conversation-id": conversation}
        return Said(await self.proxy.client.post(CHAT, json=body, headers=headers), CHAT)

    def asking(self, body: Json, conversation: str = "c") -> asyncio.Task[Said]:
        """One turn of a client that may hang up: see ``hung_up``."""
        name = f"user-{next(_names)}"
        return asyncio.create_task(self.ask(body | {"user": name}, conversation), name=name)

    async def begun(self, **more: object) -> Json:
        """A conversation after its first turn; the body of its second."""
        first = await self.say(chat([user(OPENING)], **more))
        return chat([user(OPENING), first.as_history, user("Go on.")], **more)

    async def hung_up(self, asking: asyncio.Task[Said]) -> None:
        """The client goes away now, if its turn is not over."""
        if asking.cancel():
            self.left.add(asking.get_name())
        await asyncio.gather(asking, return_exceptions=True)

    # --- what must be true afterwards

    async def afterwards(
        self,
        *entries: str,
        left_to_lease: str = "",
        left_to_ttl: str = "",
        late: str = "",
        deletes: bool = True,
        unseen: bool = False,
    ) -> None:
        """Nothing is held but the newest turn of each of the conversations ``entries``, and nothing runs.

        ``left_to_lease`` and ``left_to_ttl`` say why, for once, only the engine itself can free what is held;
        ``late`` why blocks may have been given back that were free already. At the end the conversations are
        deleted, and then nothing may be held at all.
        """
        await eventually(self._at_rest)
        if left_to_lease:
            self.cluster.clock.advance(LEASE)
        if left_to_ttl:
            self.cluster.clock.advance(TTL)
        await self._settle_to(set(entries), unseen=unseen)
        harmless = {"late-notification"} if late or left_to_ttl or unseen else set()
        assert self.cluster.kinds() <= harmless, self.cluster.hazards
        if deletes:
            for conversation in entries:
                assert (await self._conversation("DELETE", conversation)).status_code == 200
            await self._settle_to(set(), unseen=unseen)
            # Each release, and each question about what a restarted worker can do, has a block or two for a lease.
            self.cluster.clock.advance(TTL if unseen else LEASE)
            await eventually(lambda: not any(engine.held() for engine in self.engines if engine.alive))
            assert self.cluster.kinds() <= harmless, self.cluster.hazards

    async def hold_no_more_than_one_each(self) -> None:
        """As ``afterwards``, where it depends on the moment which conversations have an entry.

        A client may leave when decode has finished and nobody has read yet what it keeps: only time frees that.
        """
        await eventually(self._at_rest)
        end = time.monotonic() + _SETTLED_WITHIN
        # What the client left behind is ended in the background; entries come and go until then.
        while wrong := await self._surplus(await self._there(), unseen=True, leased=False):
            assert time.monotonic() < end, wrong
            await asyncio.sleep(0.05)
        self.cluster.clock.advance(LEASE)
        assert not (wrong := await self._surplus(await self._there(), unseen=True)), wrong
        assert self.cluster.kinds() <= {"late-notification"}, self.cluster.hazards
        await self.afterwards(*await self._there(), left_to_ttl="", unseen=True)

    async def _there(self) -> set[str]:
        return {n for n in self.conversations if (await self._conversation("GET", n)).status_code == 200}

    async def _at_rest(self) -> bool:
        for engine in self.engines:
            await engine.settle(within=GENEROUS)
        running = await self.proxy.metric("turnback_turns_running") + await self.proxy.metric("turnback_turns_queued")
        workers = (await self.proxy.client.get("/ready")).json()["workers"]
        return not running and not any(worker["in_flight"] for worker in workers)

    async def _settle_to(self, entries: set[str], *, unseen: bool) -> None:
        end = time.monotonic() + _SETTLED_WITHIN
        while wrong := await self._surplus(entries, unseen=unseen):
            assert time.monotonic() < end, wrong
            await asyncio.sleep(0.02)

    async def _surplus(self, entries: set[str], *, unseen: bool = False, leased: bool = True) -> str:
        """What is held and should not be, or the other way round; empty if all is well."""
        found = {name: await self._conversation("GET", name) for name in self.conversations | entries}
        # Of a worker that is gone nothing is held, whatever is still written down for the case that it comes back.
        alive = {engine.url for engine in self.engines if engine.alive}
        kept_for = {
            name: response.json()["retained"] for name, response in found.items() if response.status_code == 200
        }
        kept_for = {name: kept for name, kept in kept_for.items() if kept[0]["worker"] in alive}
        if kept_for.keys() != entries:
            return f"entries of {sorted(kept_for)}, not of {sorted(entries)}"
        told = Counter((kept["worker"], kept["blocks"]) for several in kept_for.values() for kept in several)
        held = Counter(
            (engine.url, len(kept.blocks)) for engine in self.engines if engine.alive for kept in engine.retained
        )
        gone = self._unseen() if unseen else Counter()
        if told - held or (held - told) - gone:
            return f"retained {dict(held)}, known {dict(told)}"
        not_read = [
            (engine.name, kept.request_id, len(kept.blocks))
            for engine in self.engines
            if engine.alive
            for kept in engine.leased
            if leased and not self._excused(engine, kept.request_id)
        ]
        running = [(engine.name, engine.held().running) for engine in self.engines if engine.held().running]
        return f"leased {not_read}, running {running}" if not_read or running else ""

    def _unseen(self) -> Counter[tuple[str, int]]:
        """What decode keeps of turns whose clients left; not of those that the proxy itself ended for them."""
        return Counter(
            (engine.url, len(kept.blocks))
            for engine in self.decode
            for kept in engine.retained
            for request in engine.requests
            if kept.request_id in request.request_ids
            and request.json.get("user") in self.left
            and request.json["max_tokens"] > 1
        )

    def _excused(self, engine: SimEngine, request_id: str) -> bool:
        """Whether it is not a turn that left this: a release, or a question about abilities."""
        return any(
            request_id in request.request_ids and (request.is_release or not _of_a_turn(request))
            for request in engine.requests
        )

    async def _conversation(self, method: str, name: str) -> httpx.Response:
        return await self.proxy.client.request(method, f"/v1/conversations/{name}", params={"model": "sim-model"})


ONE_EACH = 1
TWO_EACH = 2


@contextlib.asynccontextmanager
async def fleet(each: int = ONE_EACH, *, engines: Json | None = None, **settings: Any) -> AsyncIterator[Fleet]:
    """``each`` prefill and decode workers, probed, and a proxy; ``settings`` are the proxy's."""
    async with Cluster() as cluster:
        options = {"kv_recompute_threshold": 16, **(engines or {})}
        prefill = [await cluster.start(f"p{number}", **options) for number in range(each)]
        decode = [await cluster.start(f"d{number}", **options) for number in range(each)]
        usual = {
            "prefill": [engine.url for engine in prefill],
            "decode": [engine.url for engine in decode],
            "probe_interval": 0.05,
            "kv_recompute_threshold": 16,
            "log_level": "error",
            "abandon_grace": 0.2,
        }
        async with running(Settings(**{**usual, **settings}), cluster.clock.now) as proxy:
            await proxy.probed()
            # What probing made the engines lease is gone by then.
            cluster.clock.advance(LEASE)
            for engine in (*prefill, *decode):
                engine.requests.clear()
            yield Fleet(cluster, prefill, decode, proxy)

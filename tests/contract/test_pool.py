"""Several workers, some of them in trouble: turns go to those that can serve them, and are answered right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from proxy.pool import LastWorker, Pool
from proxy.settings import Settings
from proxy.worker_spec import WorkerSpec
from router.workers import Role
from tests.contract.answers import CHAT, DONE, OPENING, chat, message_of, user
from tests.contract.conftest import Json, Said
from tests.running import Running, eventually, running
from tests.simulator import Cluster, Recorded, SimEngine
from tests.simulator.server import Server


@dataclass
class Fleet:
    """One proxy in front of several workers of each role."""

    cluster: Cluster
    prefill: list[SimEngine]
    decode: list[SimEngine]
    proxy: Running
    pool: Pool

    async def say(self, body: Json, conversation: str = "c") -> Said:
        """Send one turn and compare it with what is true."""
        alive = next(engine for engine in (*self.decode, *self.prefill) if engine.alive)
        truth = await alive.cold_answer(body)
        response = await self.proxy.post(CHAT, body, x_conversation_id=conversation)
        said = Said(response, CHAT)
        assert response.status_code == 200, response.text
        assert said.message == message_of(truth, CHAT), (said.outcome, said.reason)
        return said

    async def started(self, conversation: str = "c") -> Json:
        """Have the first turn of a conversation; the body of its second."""
        first = await self.say(chat([user(OPENING)]), conversation)
        return chat([user(OPENING), first.as_history, user("Go on.")])

    async def state(self, engine: SimEngine) -> Json:
        """Of one worker, as ``/ready`` shows it."""
        workers = (await self.proxy.client.get("/ready")).json()["workers"]
        return next(worker for worker in workers if worker["url"] == engine.url)

    async def shows(self, engine: SimEngine, **state: object) -> None:
        """Wait until ``/ready`` shows a worker so."""

        async def does() -> bool:
            return state.items() <= (await self.state(engine)).items()

        await eventually(does)

    async def released(self, count: int) -> None:
        """Wait until so many releases were made."""

        async def were() -> bool:
            return await self.proxy.metric("turnback_releases_total", result="released") == count

        await eventually(were)

    def holder(self) -> SimEngine:
        """The decode worker that retains something."""
        (holder,) = [engine for engine in self.decode if engine.retained]
        return holder

    def other(self, engine: SimEngine) -> SimEngine:
        """The other one of two."""
        (other,) = [one for one in self.decode if one is not engine]
        return other

    async def at_rest(self) -> None:
        """Wait until nothing is under way anywhere; fail if the proxy still counts something."""
        for engine in (*self.prefill, *self.decode):
            await engine.settle(within=30.0)

        async def nothing() -> bool:
            workers = (await self.proxy.client.get("/ready")).json()["workers"]
            return all(worker["in_flight"] == 0 for worker in workers)

        await eventually(nothing)


MakeFleet = Callable[..., AbstractAsyncContextManager[Fleet]]


@pytest.fixture
def make_fleet(monkeypatch: pytest.MonkeyPatch) -> MakeFleet:
    """Makes a fleet of so many workers; ``spec`` makes a setting's entry of an engine, the rest are settings."""
    pools: list[Pool] = []

    def remembered(*parts: Any) -> Pool:
        pools.append(Pool(*parts))
        return pools[-1]

    monkeypatch.setattr("proxy.app.Pool", remembered)

    @contextlib.asynccontextmanager
    async def make(
        *,
        prefill: int = 2,
        decode: int = 2,
        spec: Callable[[SimEngine], Any] = lambda engine: engine.url,
        engines: Json | None = None,
        kind: type[SimEngine] | None = None,
        probed: bool = True,
        **settings: Any,
    ) -> AsyncIterator[Fleet]:
        from tests.simulator import Options

        async with Cluster() as cluster:
            made: dict[str, list[SimEngine]] = {"p": [], "d": []}
            for letter, count in (("p", prefill), ("d", decode)):
                for number in range(count):
                    options = Options(**{"kv_recompute_threshold": 16, **(engines or {})})
                    engine = (kind or SimEngine)(cluster, f"{letter}{number}", options)
                    await engine.start()
                    made[letter].append(engine)
            chosen = Settings(
                **{
                    "prefill": [spec(engine) for engine in made["p"]],
                    "decode": [spec(engine) for engine in made["d"]],
                    "probe_interval": 0.05,
                    "kv_recompute_threshold": 16,
                    "log_level": "error",
                    **settings,
                }
            )
            async with running(chosen, cluster.clock.now) as proxy:
                if probed:
                    await proxy.probed()
                    cluster.clock.advance(31)
                for engine in cluster.engines:
                    engine.requests.clear()
                yield Fleet(cluster, made["p"], made["d"], proxy, pools[-1])

    return make


def reuses(request: Recorded) -> bool:
    return prefills(request) and bool(request.kv and request.kv.get("remote_block_ids"))


def prefills(request: Recorded) -> bool:
    return request.path == CHAT and request.is_prefill and not request.is_release


def is_health(request: Recorded) -> bool:
    return request.path == "/health"


# --- health


async def test_a_killed_worker_of_each_role_costs_no_turn(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        body = await fleet.started()
        await fleet.holder().stop()
        await fleet.prefill[0].stop()
        for number in range(4):
            await fleet.say(body, f"c{number}")
        await fleet.say(body)
        assert (await fleet.say(body)).outcome in ("hit", "partial"), "the next turn reuses again"
        await fleet.at_rest()
        assert not fleet.cluster.hazards


async def test_a_killed_worker_is_sent_nothing_once_it_is_known_to_be_down(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        await fleet.decode[0].stop()
        await fleet.shows(fleet.decode[0], up=False)
        for number in range(6):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        assert await fleet.proxy.metric("turnback_fallbacks_total") == 0
        await fleet.decode[0].start()
        await fleet.shows(fleet.decode[0], up=True)
        for number in range(6):
            await fleet.say(chat([user(OPENING)]), f"n{number}")
        assert [request for request in fleet.decode[0].requests if request.is_decode]


async def test_flapping_health_does_not_flap(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, prefill=1) as fleet:
        (decode,) = fleet.decode
        for _ in range(3):
            decode.fail_next(status=503, times=2, when=is_health)
            await eventually(lambda: not decode.faults.pending)
            decode.probes.clear()
            await eventually(lambda: len(decode.probes) > 4)
            assert (await fleet.state(decode))["up"]
        decode.fail_next(status=503, times=1000, when=is_health)
        await fleet.shows(decode, up=False)
        decode.faults.clear()
        await fleet.shows(decode, up=True)


async def test_metrics_that_fail_take_nobody_down(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, prefill=1) as fleet:
        body = await fleet.started()
        for engine in (*fleet.prefill, *fleet.decode):
            engine.fail_next(status=500, times=1000, when=lambda request: request.path == "/metrics")
        seen = len(fleet.decode[0].probes)
        await eventually(lambda: len(fleet.decode[0].probes) > seen + 10)
        assert (await fleet.state(fleet.decode[0]))["up"]
        assert (await fleet.say(body)).outcome == "hit"


async def test_worker_that_never_told_its_start_serves_without_reuse(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, prefill=1, probed=False, probe_interval=0.02) as fleet:
        (decode,) = fleet.decode
        await decode.restart()
        decode.fail_next(status=404, times=10_000, when=lambda request: request.path == "/metrics")
        await fleet.shows(decode, up=True)
        await fleet.say(chat([user(OPENING)]))
        await fleet.say(chat([user(OPENING)]))


async def test_death_during_discovery_is_noticed_at_once(make_fleet: MakeFleet) -> None:
    """Questions about abilities may take a minute; the probe goes on meanwhile."""
    async with make_fleet(decode=2, prefill=1) as fleet:
        decode = fleet.decode[0]
        decode.hang_next("before_headers", times=100, when=lambda request: request.path == CHAT)
        await decode.restart()
        await fleet.shows(decode, up=True, probed=False)
        assert (await fleet.state(decode))["generation"] is not None
        await decode.partition()
        await fleet.shows(decode, up=False)
        decode.faults.clear()
        await decode.heal()
        await fleet.shows(decode, up=True, probed=True)


async def test_stream_begun_on_the_new_start_of_a_worker_is_not_broken_when_the_restart_is_noticed(
    make_fleet: MakeFleet,
) -> None:
    async with make_fleet(decode=1, prefill=1, probe_interval=0.02) as fleet:
        (decode,) = fleet.decode
        before = (await fleet.state(decode))["generation"]
        decode.fail_next(status=500, times=100_000, when=lambda request: request.path == "/metrics")
        await decode.restart()
        seen = len(decode.probes)
        await eventually(lambda: len(decode.probes) > seen + 10)
        gate = decode.pause_stream = asyncio.Event()
        request = fleet.proxy.client.build_request("POST", CHAT, json=chat([user(OPENING)], stream=True))
        opening = asyncio.create_task(fleet.proxy.client.send(request, stream=True))

        async def begun() -> bool:
            gate.set()
            return opening.done()

        async def noticed() -> bool:
            return bool((await fleet.state(decode))["generation"] != before)

        await eventually(begun)
        decode.faults.clear()
        await eventually(noticed)
        decode.pause_stream = None
        gate.set()
        assert (await (await opening).aread()).decode().endswith(DONE)


async def test_a_restart_is_a_new_generation(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        body = await fleet.started()
        holder = fleet.holder()
        before = (await fleet.state(holder))["generation"]
        await holder.restart()

        async def renewed() -> bool:
            state = await fleet.state(holder)
            return bool(state["up"] and state["probed"] and state["generation"] not in (None, before))

        await eventually(renewed)
        assert (await fleet.say(body)).outcome == "stale"
        assert not [request for engine in fleet.prefill for request in engine.requests if reuses(request)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_whole_role_that_is_down_leaves_the_turns_to_the_other(make_fleet: MakeFleet, role: str) -> None:
    async with make_fleet() as fleet:
        body = await fleet.started()
        engines = fleet.prefill if role == "prefill" else fleet.decode
        for engine in engines:
            await engine.partition()
            await fleet.shows(engine, up=False)
        said = await fleet.say(body)
        assert (said.outcome, said.reason) == ("unsupported", "role_down")
        assert await fleet.proxy.metric("turnback_fallbacks_total") == 0, "nobody was tried that is known to be down"
        for engine in engines:
            await engine.heal()
            await fleet.shows(engine, up=True)
        assert (await fleet.say(body)).outcome == "hit", "the entry was not lost over it"
        await fleet.at_rest()


async def test_everything_down_is_a_503(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        for engine in (*fleet.prefill, *fleet.decode):
            await engine.stop()
        for known in (False, True):
            if known:
                for engine in (*fleet.prefill, *fleet.decode):
                    await fleet.shows(engine, up=False)
            response = await fleet.proxy.post(CHAT, chat([user(OPENING)]))
            assert response.status_code == 503
        assert (await fleet.proxy.client.get("/ready")).status_code == 503


# --- the circuit breaker


async def test_breaker_opens_on_failures_lets_one_trial_through_and_closes(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, breaker_failures=2, breaker_seconds=2.0) as fleet:
        sick = fleet.prefill[0]
        sick.fail_next(status=500, times=1000, when=prefills)
        for number in range(6):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        await fleet.shows(sick, breaker="open", up=True)
        sick.requests.clear()
        await fleet.say(chat([user(OPENING)]), "x")
        assert not sick.requests

        # Conversations without a worker of their own, which the idle one attracts.
        async def tried() -> bool:
            await fleet.say(chat([user(OPENING)]), "")
            return any(prefills(request) for request in sick.requests)

        await eventually(tried)
        assert len([r for r in sick.requests if prefills(r)]) == 1, "one trial, which failed"
        assert (await fleet.state(sick))["breaker"] == "open"
        sick.faults.clear()

        async def closed() -> bool:
            await fleet.say(chat([user(OPENING)]), "")
            return bool((await fleet.state(sick))["breaker"] == "closed")

        await eventually(closed)
        await fleet.at_rest()


@pytest.mark.parametrize(("failures", "seconds"), [(3, 60.0), (1, 1e-3)], ids=["in a row", "half open"])
async def test_a_worker_that_answers_releases_and_fails_turns_is_taken_out(
    make_fleet: MakeFleet, failures: int, seconds: float
) -> None:
    async with make_fleet(decode=1, prefill=1, breaker_failures=failures, breaker_seconds=seconds) as fleet:
        sick = fleet.prefill[0]
        for number in range(failures):
            await fleet.say(chat([user(OPENING)]), f"earlier{number}")
        sick.fail_next(status=500, times=1000, when=prefills)
        for number in range(failures):
            await fleet.say(chat([user(OPENING)]), "now")
            query = {"model": "sim-model"}
            await fleet.proxy.client.delete(f"/v1/conversations/earlier{number}", params=query)
            await fleet.released(number + 1)
        assert (await fleet.state(sick))["breaker"] == "open"
        await fleet.at_rest()


async def test_a_workers_own_4xx_is_no_failure_of_it(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, prefill=1, breaker_failures=1) as fleet:
        for _ in range(3):
            assert (await fleet.proxy.post(CHAT, chat([user(OPENING)], temperature=-5))).status_code == 400
        assert (await fleet.state(fleet.prefill[0]))["breaker"] == "closed"


async def test_a_reuse_that_fails_is_not_held_against_prefill(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, prefill=1, breaker_failures=1) as fleet:
        body = await fleet.started()
        fleet.prefill[0].fail_next(status=500, when=reuses)
        assert (await fleet.say(body)).outcome == "failed"
        assert (await fleet.state(fleet.prefill[0]))["breaker"] == "closed"


async def test_hanging_worker_is_left_alone_after_its_first_victims(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1, breaker_failures=1, breaker_seconds=60, prefill_timeout=0.5) as fleet:
        hung = fleet.prefill[0]
        hung.hang_next("before_headers", times=1000, when=prefills)
        for number in range(4):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        assert len([request for request in hung.requests if prefills(request)]) == 1


# --- selection


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
async def test_conversations_are_spread_over_all_workers(make_fleet: MakeFleet, policy: str) -> None:
    async with make_fleet(policy=policy) as fleet:
        for number in range(8):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        for engine in (*fleet.prefill, *fleet.decode):
            assert len([r for r in engine.requests if prefills(r) or r.is_decode]) == 4


async def test_a_conversation_stays_with_its_workers(make_fleet: MakeFleet) -> None:
    async with make_fleet(prefill=3, decode=3) as fleet:
        body = await fleet.started()
        for engine in fleet.cluster.engines:
            engine.requests.clear()
        for _ in range(4):
            said = await fleet.say(body)
            assert said.outcome in ("hit", "partial")
        assert sorted(len([r for r in e.requests if prefills(r)]) for e in fleet.prefill) == [0, 0, 4]
        assert sorted(len([r for r in e.requests if r.is_decode]) for e in fleet.decode) == [0, 0, 4]


async def test_a_holder_past_the_bound_is_read_from_and_another_decodes(make_fleet: MakeFleet) -> None:
    async with make_fleet(affinity_slack=0, affinity_factor=1) as fleet:
        body = await fleet.started()
        holder = fleet.holder()
        worker = fleet.pool.find(Role.DECODE, holder.url)
        assert worker is not None
        with fleet.pool.leg(worker, 1000):
            said = await fleet.say(body)
        assert said.outcome == "hit"
        assert fleet.other(holder).retained
        assert not holder.retained, "prefill's read freed it"


async def test_releases_do_not_take_the_workers_turn(make_fleet: MakeFleet) -> None:
    """Each turn without an id is followed by a release: that once had all the turns on one worker of two."""
    async with make_fleet() as fleet:
        for number in range(1, 9):
            await fleet.say(chat([user(OPENING)]), "")
            await fleet.released(number)
        for engine in fleet.prefill:
            assert len([request for request in engine.requests if prefills(request)]) == 4


# --- workers that come and go


async def test_drained_decode_is_reused_from_and_gets_nothing_new(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        body = await fleet.started()
        holder = fleet.holder()
        assert fleet.pool.drain(Role.DECODE, holder.url)
        assert (await fleet.state(holder))["draining"]
        holder.requests.clear()
        for number in range(4):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        assert (await fleet.say(body)).outcome == "hit"
        assert not [request for request in holder.requests if request.is_decode]
        assert not holder.retained, "it moved off by being reused"
        assert fleet.pool.at_rest(Role.DECODE, holder.url)
        assert await fleet.pool.remove(Role.DECODE, holder.url)
        assert (await fleet.say(body)).outcome in ("hit", "partial")
        assert not fleet.cluster.hazards


async def test_drained_prefill_gets_no_legs_and_may_come_back(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        drained = fleet.prefill[0]
        fleet.pool.drain(Role.PREFILL, drained.url)
        for number in range(4):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        assert not [request for request in drained.requests if request.is_prefill]
        fleet.pool.add(Role.PREFILL, WorkerSpec(drained.url))
        for number in range(4):
            await fleet.say(chat([user(OPENING)]), f"n{number}")
        assert [request for request in drained.requests if request.is_prefill]


async def test_removed_decode_makes_its_entries_stale(make_fleet: MakeFleet) -> None:
    async with make_fleet() as fleet:
        body = await fleet.started()
        holder = fleet.holder()
        assert await fleet.pool.remove(Role.DECODE, holder.url)
        said = await fleet.say(body)
        assert (said.outcome, said.reason) == ("stale", "worker_gone")
        seen = len(holder.probes)
        shown = (await fleet.proxy.client.get("/metrics")).text.splitlines()
        assert not [line for line in shown if line.startswith("turnback_worker_") and holder.url in line]
        await eventually(lambda: len(fleet.other(holder).probes) > 20)
        assert len(holder.probes) == seen, "it is watched no more"


async def test_added_worker_is_watched_and_used(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1) as fleet:
        added = await fleet.cluster.start("d9", kv_recompute_threshold=16)
        fleet.pool.add(Role.DECODE, WorkerSpec(added.url))
        await fleet.shows(added, up=True, probed=True)
        for number in range(4):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        assert [request for request in added.requests if request.is_decode]


async def test_last_worker_of_a_role_stays(make_fleet: MakeFleet) -> None:
    async with make_fleet(decode=1) as fleet:
        with pytest.raises(LastWorker):
            await fleet.pool.remove(Role.DECODE, fleet.decode[0].url)
        assert not await fleet.pool.remove(Role.DECODE, "http://nobody:1")
        assert not fleet.pool.drain(Role.DECODE, "http://nobody:1")
        fleet.pool.drain(Role.DECODE, fleet.decode[0].url)
        await fleet.say(chat([user(OPENING)]))


# --- data-parallel ranks, keys, addresses


async def test_each_rank_is_a_worker_and_every_leg_names_its_rank(make_fleet: MakeFleet) -> None:
    async with make_fleet(prefill=1, decode=1, spec=lambda engine: f"{engine.url}#dp=2") as fleet:
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        names = [worker["worker"] for worker in (await fleet.proxy.client.get("/ready")).json()["workers"]]
        assert names == [f"{engine.url}#rank={rank}" for engine in (prefill, decode) for rank in (0, 1)]
        bodies = [await fleet.started(f"c{number}") for number in range(4)]
        ranks = [request.headers["X-data-parallel-rank"] for request in decode.requests if request.is_decode]
        assert sorted(ranks) == ["0", "0", "1", "1"]
        decode.requests.clear()
        for number, body in enumerate(bodies):
            assert (await fleet.say(body, f"c{number}")).outcome == "hit"
        again = [request.headers["X-data-parallel-rank"] for request in decode.requests if request.is_decode]
        assert again == ranks, "a conversation stays with its rank"
        await fleet.say(chat([user(OPENING)]), "c0")
        await fleet.proxy.post(CHAT, chat([user(OPENING)]))
        await eventually(lambda: any(request.is_release for request in prefill.requests))
        assert all("X-data-parallel-rank" in request.headers for request in prefill.requests)


async def test_each_worker_is_sent_its_own_key(make_fleet: MakeFleet) -> None:
    def spec(engine: SimEngine) -> Any:
        return {"url": engine.url, "api_key": "own"} if engine.name == "d1" else engine.url

    async with make_fleet(spec=spec, worker_api_key="shared") as fleet:
        for number in range(4):
            await fleet.say(chat([user(OPENING)]), f"c{number}")
        for engine in (*fleet.prefill, *fleet.decode):
            keys = {request.headers.get("Authorization") for request in (*engine.requests, *engine.probes)}
            assert keys == {"Bearer own" if engine.name == "d1" else "Bearer shared"}


class OnIPv6(SimEngine):
    """Listens on the loopback address of IPv6."""

    @property
    def url(self) -> str:
        return super().url.replace("127.0.0.1", "[::1]")

    async def _listen(self) -> None:
        self._runner = web.AppRunner(Server(self).application(), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "::1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]


async def test_ipv6_workers(make_fleet: MakeFleet, has_ipv6: None) -> None:
    async with make_fleet(kind=OnIPv6, prefill=1, decode=1) as fleet:
        body = await fleet.started()
        assert (await fleet.say(body)).outcome == "hit"
        assert (await fleet.state(fleet.decode[0]))["worker"].startswith("http://[::1]:")


@pytest.fixture
def has_ipv6() -> None:
    """Skips on machines without it."""
    import socket

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")

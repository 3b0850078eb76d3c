"""Told to end, the command ends what it began and begins nothing more."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import httpx
import pytest

from tests.contract.answers import CHAT, DONE, OPENING, chat, joined, message_of, user
from tests.contract.answers import chunks_of as chunks
from tests.contract.command import Command, is_ready, ready, serving, serving_children
from tests.processes import alive, children
from tests.redis_server import RedisServer
from tests.running import GENEROUS, eventually

BODY = chat([user(OPENING)], stream=True)


class Stream:
    """A turn whose answer decode holds back after its first events."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._gate = command.decode.pause_stream = asyncio.Event()
        self.text = ""
        self.broken = False
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with (
            httpx.AsyncClient(timeout=GENEROUS) as client,
            client.stream("POST", self._command.url + CHAT, json=BODY) as response,
        ):
            try:
                async for text in response.aiter_text():
                    self.text += text
            except httpx.TransportError:
                self.broken = True

    async def begun(self) -> None:
        """Wait until the client has seen something of it."""
        while not self.text:
            self._gate.set()
            await asyncio.sleep(0.01)

    def go_on(self) -> None:
        """Let decode send the rest."""
        self._command.decode.pause_stream = None
        self._gate.set()

    async def whole(self) -> str:
        """All of it, when it has ended in whatever way."""
        await asyncio.wait_for(self._reading, GENEROUS)
        return self.text


async def right(command: Command, text: str) -> bool:
    """Whether ``text`` is a complete stream and says what is true."""
    truth = await command.decode.cold_answer(BODY)
    return joined(chunks(text), CHAT) == message_of(truth, CHAT)


@pytest.fixture(params=[1, 2])
def processes(request: pytest.FixtureRequest) -> list[str]:
    """Arguments for one process, and for several."""
    if request.param == 1:
        return []
    server: RedisServer = request.getfixturevalue("redis_server")
    return ["--workers", str(request.param), "--store", server.url]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_stream_that_runs_goes_on_to_its_end_and_then_the_command_exits_0(
    processes: list[str], sig: signal.Signals
) -> None:
    async with serving(*processes) as command:
        untold = Stream(command)
        await untold.begun()
        untold.go_on()
        told = Stream(command)
        await told.begun()
        command.tell(sig)
        await asyncio.sleep(0.5)
        told.go_on()
        assert _comparable(await told.whole()) == _comparable(await untold.whole())
        assert await right(command, told.text)
        assert await command.exit_code() == 0


def _comparable(stream: str) -> str:
    """Without what differs between any two answers: ids and times."""
    return re.sub(r'"(id|created|remote_\w+|prompt_logprobs)": ?("[^"]*"|[\d.]+)', "", stream)


async def test_while_it_drains_it_says_so_and_takes_no_turn() -> None:
    async with serving() as command, httpx.AsyncClient(timeout=GENEROUS) as kept_alive:
        await kept_alive.get(f"{command.url}/health")
        stream = Stream(command)
        await stream.begun()
        command.tell()

        async def drains() -> bool:
            status, body = await ready(command)
            return bool(status == 503 and body["draining"] and not body["ready"])

        await eventually(drains, within=1)
        legs = len(command.decode.requests)
        for client in (kept_alive, httpx.AsyncClient(timeout=GENEROUS)):
            response = await client.post(command.url + CHAT, json=BODY)
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "service_unavailable_error"
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["connection"] == "close"
            assert (await client.get(f"{command.url}/health")).status_code == 200
            await client.aclose()
        assert [request for request in command.decode.requests[legs:] if request.method == "POST"] == []
        stream.go_on()
        assert await right(command, await stream.whole())
        assert await command.exit_code() == 0


async def test_a_queued_turn_is_refused_at_once_when_it_drains() -> None:
    async with serving("--max-turns-per-worker", "1") as command, httpx.AsyncClient(timeout=GENEROUS) as client:
        stream = Stream(command)
        await stream.begun()
        waiting = asyncio.create_task(client.post(command.url + CHAT, json=BODY))
        await eventually(lambda: _queued(command))
        command.tell()
        assert (await waiting).status_code == 503
        stream.go_on()
        assert await right(command, await stream.whole())
        assert await command.exit_code() == 0


async def _queued(command: Command) -> bool:
    async with httpx.AsyncClient(timeout=GENEROUS) as client:
        return "turnback_turns_queued 1.0" in (await client.get(f"{command.url}/metrics")).text


async def test_idle_connections_do_not_hold_it_up(processes: list[str]) -> None:
    async with serving(*processes) as command:
        limits = httpx.Limits(max_keepalive_connections=8)
        async with httpx.AsyncClient(timeout=GENEROUS, limits=limits) as client:
            await asyncio.gather(*(client.get(f"{command.url}/health") for _ in range(8)))
            command.tell()
            assert await command.exit_code(within=8) == 0


async def test_what_is_not_over_in_time_ends_with_an_error_and_no_end_mark(processes: list[str]) -> None:
    async with serving(*processes, "--drain-timeout", "0.5") as command:
        stream = Stream(command)
        await stream.begun()
        command.tell()
        text = await stream.whole()
        assert not stream.broken, "ended, not cut"
        assert DONE not in text
        assert "shutting down" in text.strip().split("\n\n")[-1]
        assert await command.exit_code() == 0


async def test_a_turn_without_a_first_byte_in_time_is_503() -> None:
    async with serving("--drain-timeout", "0.5") as command, httpx.AsyncClient(timeout=GENEROUS) as client:
        command.decode.hang_next("before_headers", when=lambda request: request.is_decode)
        asking = asyncio.create_task(client.post(command.url + CHAT, json=BODY))
        await eventually(lambda: any(request.is_decode for request in command.decode.requests))
        command.tell()
        response = await asking
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert await command.exit_code() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(processes: list[str], second: signal.Signals) -> None:
    async with serving(*processes) as command:
        stream = Stream(command)
        await stream.begun()
        command.tell()
        await asyncio.sleep(0.5)
        assert command.process.returncode is None
        command.tell(second)
        assert await command.exit_code(within=8) == 1
        assert DONE not in await stream.whole()


async def test_children_told_by_a_terminal_too_still_drain(redis_url: str) -> None:
    """Ctrl-C, and some service managers, signal every process, and the parent passes it on: that is not twice."""
    async with serving("--workers", "2", "--store", redis_url) as command:
        stream = Stream(command)
        await stream.begun()
        for sig in (signal.SIGINT, signal.SIGTERM):
            for pid in children(command.process.pid):
                os.kill(pid, sig)
        command.tell(signal.SIGINT)
        await asyncio.sleep(0.5)
        stream.go_on()
        assert await right(command, await stream.whole())
        assert await command.exit_code() == 0


async def test_a_child_that_is_killed_is_replaced_and_counts_no_more(redis_url: str) -> None:
    async with serving("--workers", "2", "--store", redis_url) as command:
        stream = Stream(command)
        await stream.begun()
        before = serving_children(command)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await stream.whole()
        assert stream.broken
        stream.go_on()
        await eventually(lambda: len(serving_children(command) - before) == 2)
        await eventually(lambda: is_ready(command))
        async with httpx.AsyncClient(timeout=GENEROUS) as client:
            text = (await client.post(command.url + CHAT, json=BODY)).text
            assert await right(command, text)
            assert "turnback_turns_running 0.0" in (await client.get(f"{command.url}/metrics")).text
        command.tell()
        assert await command.exit_code() == 0


async def test_what_a_child_that_was_killed_saw_last_is_not_shown_for_ever(redis_url: str) -> None:
    """It saw a worker down; its successor sees it up, and the alert must end."""
    async with (
        serving("--workers", "2", "--store", redis_url) as command,
        httpx.AsyncClient(timeout=GENEROUS) as client,
    ):

        async def shown_up(value: str) -> bool:
            text = (await client.get(f"{command.url}/metrics")).text
            shown = f'turnback_worker_up{{role="decode",worker="{command.decode.url}"}} {value}'
            return shown in text.splitlines()

        await eventually(lambda: shown_up("1.0"))
        await command.decode.partition()
        await eventually(lambda: shown_up("0.0"))
        for pid in serving_children(command):
            os.kill(pid, signal.SIGKILL)
        await command.decode.heal()
        await eventually(lambda: is_ready(command))
        await eventually(lambda: shown_up("1.0"))


async def test_children_of_a_parent_that_is_gone_end_too(redis_url: str) -> None:
    async with serving("--workers", "2", "--store", redis_url) as command:
        left = serving_children(command)
        assert len(left) == 2
        command.process.kill()
        await command.process.wait()
        await eventually(lambda: not any(map(alive, left)))

"""The config file is edited while turns go on: workers come and go, and nothing else changes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings_load import load
from tests.contract.answers import CHAT, OPENING, chat, user
from tests.running import Running, eventually, running
from tests.simulator import Cluster, SimEngine

ENGINES = {"kv_recompute_threshold": 16}
OTHERS = {"probe_interval": 0.05, "kv_recompute_threshold": 16, "abandon_grace": 0.2, "retained_watch_interval": 0.1}


@dataclass
class Edited:
    """A proxy, two engines of each role, and the config file, which names the first of each at first."""

    cluster: Cluster
    prefill: list[SimEngine]
    decode: list[SimEngine]
    file: Path
    proxy: Running

    def write(self, **settings: Any) -> None:
        """The file anew: as it was at first, but for these ``settings``."""
        write(self.file, as_first(self.prefill, self.decode) | settings)

    async def workers(self) -> dict[str, bool]:
        """Who is in the pool, and whether it drains."""
        listed = (await self.proxy.client.get("/ready")).json()["workers"]
        return {worker["worker"]: worker["draining"] for worker in listed}

    async def are(self, *engines: SimEngine) -> None:
        """Wait until these are the workers, and none drains."""

        async def so() -> bool:
            return await self.workers() == {engine.url: False for engine in engines}

        await eventually(so)

    async def say(self, messages: list[dict[str, Any]], conversation: str) -> tuple[str, dict[str, Any]]:
        """One turn: its outcome, and what was answered, which is compared with what is true."""
        body = chat(messages)
        truth = await self.decode[0].cold_answer(body)
        response = await self.proxy.post(CHAT, body, x_conversation_id=conversation)
        assert response.status_code == 200, response.text
        said = response.json()["choices"][0]["message"]
        assert said == truth["choices"][0]["message"]
        return response.headers["x-turnback-reuse"], {"role": "assistant", "content": said["content"]}


def as_first(prefill: list[SimEngine], decode: list[SimEngine]) -> dict[str, Any]:
    return {"prefill": [prefill[0].url], "decode": [decode[0].url], **OTHERS}


def write(file: Path, settings: dict[str, Any]) -> None:
    """As editors do: a new file in the old one's place."""
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump(settings))
    new.replace(file)


@contextlib.asynccontextmanager
async def edited(file: Path, *arguments: str) -> AsyncIterator[Edited]:
    """``arguments`` are more of the command line; ``{d0}`` there is the first decode worker's URL."""
    async with Cluster() as cluster:
        prefill = [await cluster.start(name, **ENGINES) for name in ("p0", "p1")]
        decode = [await cluster.start(name, **ENGINES) for name in ("d0", "d1")]
        write(file, as_first(prefill, decode))
        settings = load(["--config", str(file), *(argument.format(d0=decode[0].url) for argument in arguments)])
        async with running(settings, cluster.clock.now) as proxy:
            await proxy.probed()
            cluster.clock.advance(31)
            yield Edited(cluster, prefill, decode, file, proxy)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "turnback.yaml"


async def test_a_decode_that_takes_anothers_place_takes_its_conversations_too(file: Path) -> None:
    async with edited(file) as house:
        messages = [user(OPENING)]
        _, answer = await house.say(messages, "c")
        house.write(decode=[house.decode[1].url])
        await eventually(lambda: _drains(house, house.decode[0]))
        await house.proxy.probed()
        house.cluster.clock.advance(31)
        assert house.decode[0].url in await house.workers(), "a conversation is retained there"

        going_on = [*messages, answer, user("Go on.")]
        outcome, second = await house.say(going_on, "c")
        assert outcome == "hit"
        await house.are(house.prefill[0], house.decode[1])
        outcome, _ = await house.say([*going_on, second, user("And then?")], "c")
        assert outcome == "hit"
        assert not house.cluster.hazards


async def _drains(house: Edited, engine: SimEngine) -> bool:
    return (await house.workers()).get(engine.url) is True


async def test_an_added_worker_takes_work(file: Path) -> None:
    async with edited(file, "--policy", "round_robin") as house:
        house.write(decode=[engine.url for engine in house.decode], prefill=[engine.url for engine in house.prefill])
        await house.are(house.prefill[0], house.decode[0], house.prefill[1], house.decode[1])
        await house.proxy.probed()
        house.cluster.clock.advance(31)
        for number in range(4):
            await house.say([user(f"{number}. {OPENING}")], f"c{number}")
        for engine in (house.prefill[1], house.decode[1]):
            legs = [request for request in engine.requests if request.is_prefill or request.is_decode]
            assert len([request for request in legs if request.path == CHAT and request.kv]) >= 2


async def test_a_worker_that_is_written_back_goes_on(file: Path) -> None:
    async with edited(file) as house:
        await house.say([user(OPENING)], "c")
        house.write(decode=[house.decode[1].url])
        await eventually(lambda: _drains(house, house.decode[0]))
        house.write(decode=[engine.url for engine in house.decode])
        await house.are(house.prefill[0], house.decode[0], house.decode[1])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("decode: [http://d:1]\n", "prefill: "),
        ("prefill: [http://p:1]\ndecode: [d:1]\n", "decode"),
        ("prefill: [http://p:1]\ndecode: [http://d:1]\nport: many\n", "port: "),
        ("prefil: [http://p:1]\n", "prefil: no such setting"),
        ("prefill: [", "is not YAML"),
        ("", "prefill: "),
        (None, "cannot read"),
    ],
)
async def test_a_wrong_file_changes_nothing(
    file: Path, content: str | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with edited(file) as house:
        spoil(file, content)
        told = await line(capsys, "the config file is wrong: all stays as it was")
        assert named in told
        await house.are(house.prefill[0], house.decode[0])
        house.write(decode=[engine.url for engine in house.decode])
        await house.are(house.prefill[0], house.decode[0], house.decode[1])


def spoil(file: Path, content: str | None) -> None:
    """Write this to the file in place; None: remove it."""
    if content is None:
        file.unlink()
    else:
        file.write_text(content)


async def line(capsys: pytest.CaptureFixture[str], wanted: str) -> str:
    """Wait for this log line."""
    seen = ""

    def there() -> bool:
        nonlocal seen
        seen += capsys.readouterr().err
        return any(wanted in line for line in seen.splitlines())

    await eventually(there)
    return next(line for line in seen.splitlines() if wanted in line)


async def test_other_settings_are_named_as_waiting_for_a_restart(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with edited(file) as house:
        house.write(port=9, admin_key="never in a log", decode=[engine.url for engine in house.decode])
        told = await line(capsys, "changes in the config file wait for a restart")
        assert "port" in told
        assert "admin_key" in told
        assert "never in a log" not in told
        assert "decode" not in told.partition("settings")[2]
        await house.are(house.prefill[0], house.decode[0], house.decode[1])


async def test_another_key_for_a_worker_that_is_there_waits_too(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with edited(file) as house:
        house.write(decode=[{"url": house.decode[0].url, "api_key": "another"}])
        told = await line(capsys, "changes in the config file wait for a restart")
        assert "decode" in told
        await house.are(house.prefill[0], house.decode[0])


async def test_what_the_command_line_names_the_file_does_not_change(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with edited(file, "--decode", "{d0}") as house:
        told = await line(capsys, "the config file has no say in these workers")
        assert "decode" in told
        house.write(decode=[house.decode[1].url], prefill=[engine.url for engine in house.prefill])
        await house.are(house.prefill[0], house.prefill[1], house.decode[0])


async def test_what_changed_before_the_watch_began_is_found(file: Path) -> None:
    """A process that takes a dead one's place is given the settings that its predecessor began with."""
    async with Cluster() as cluster:
        engines = [await cluster.start(name, **ENGINES) for name in ("p0", "d0", "d1")]
        write(file, as_first(engines[:1], engines[1:]))
        settings = load(["--config", str(file)])
        write(file, as_first(engines[:1], engines[2:]))
        async with running(settings, cluster.clock.now) as proxy:
            await Edited(cluster, engines[:1], engines[1:], file, proxy).are(engines[0], engines[2])


async def test_a_mounted_config_map_is_followed(tmp_path: Path) -> None:
    """Kubernetes shows the file by a link into a folder that is a link itself, and replaces that one."""
    first, second, mount = tmp_path / "mount/..1", tmp_path / "mount/..2", tmp_path / "mount"
    first.mkdir(parents=True)
    (mount / "..data").symlink_to("..1")
    (mount / "turnback.yaml").symlink_to("..data/turnback.yaml")
    async with Cluster() as cluster:
        engines = [await cluster.start(name, **ENGINES) for name in ("p0", "d0", "d1")]
        write(first / "turnback.yaml", as_first(engines[:1], engines[1:]))
        settings = load(["--config", str(mount / "turnback.yaml")])
        async with running(settings, cluster.clock.now) as proxy:
            await proxy.probed()
            second.mkdir()
            write(second / "turnback.yaml", as_first(engines[:1], engines[2:]))
            (mount / "..data_tmp").symlink_to("..2")
            os.replace(mount / "..data_tmp", mount / "..data")
            await Edited(cluster, engines[:1], engines[1:], mount, proxy).are(engines[0], engines[2])

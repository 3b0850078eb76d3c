"""The page at /dashboard, as people see it: in Chromium, against a router that has served turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, Route, expect

from metadata_store.keys import conversation_key, derive_secret
from tests.chromium import chromium
from tests.contract.answers import CHAT, OPENING, chat, chunks_of, joined, user
from tests.contract.command import Command, serving, serving_children
from tests.contract.conftest import House
from tests.running import GENEROUS, eventually

SECRET = "the secret of these tests"
KEY = "a key that nobody may see"
SLOW_PREFILL = {"prefill_seconds_per_token": 0.002, "prefix_caching": False}
"""So that it is worth something not to compute tokens again, whatever else the machine does."""

Json = dict[str, Any]

READ_ROWS = """table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))"""
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", event => window.violations.push(event.effectiveDirective));
"""
CONTRASTS = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const channel = value => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return [...document.body.querySelectorAll("*")]
    .filter(e => e.offsetParent && [...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim()))
    .map(e => [ratio(light(parse(getComputedStyle(e).color)), light(behind(e))), e.tagName, e.innerText]);
}"""


@dataclass
class Looked:
    """A page that is being looked at."""

    page: Page
    asked: list[str] = field(default_factory=list)
    """The addresses of all requests."""
    complaints: list[str] = field(default_factory=list)
    """Of the browser, and of the page's own code."""

    async def rows(self, table: str) -> list[list[str]]:
        """The text of a table's cells."""
        found: list[list[str]] = await self.page.locator(f"#{table}").evaluate(READ_ROWS)
        return found

    async def shows(self, table: str, rows: list[list[str]]) -> None:
        """Wait until a table shows these."""
        try:
            await eventually(lambda: self._same(table, rows))
        except AssertionError:
            assert await self.rows(table) == rows

    async def _same(self, table: str, rows: list[list[str]]) -> bool:
        return await self.rows(table) == rows


@contextlib.asynccontextmanager
async def looking(url: str, *, answers: bool = True, **how: Any) -> AsyncIterator[Looked]:
    """The page of the router at ``url``, loaded; ``how`` as Playwright has it.

    At the end it must have asked nobody else, and, unless ``answers`` is false, there must be no complaints.
    """
    async with chromium() as browser:
        page = await browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **how})
        looked = Looked(page)
        page.on("request", lambda request: looked.asked.append(request.url))
        page.on("console", lambda message: looked.complaints.append(message.text))
        page.on("pageerror", lambda error: looked.complaints.append(str(error)))
        await page.add_init_script(WATCH_POLICY)
        await page.goto(f"{url}/dashboard")
        await expect(page.locator("#workers tbody tr").first).to_be_visible()
        yield looked
        assert all(address.startswith(f"{url}/dashboard") for address in looked.asked), looked.asked
        assert await page.evaluate("() => window.violations") == []
        assert not answers or not looked.complaints, looked.complaints


@dataclass
class Talk:
    """What was said to the router, and what it told of it."""

    url: str
    outcomes: dict[str, list[str]] = field(default_factory=dict)
    """By conversation."""
    reused: int = 0
    computed: int = 0
    prompts: list[int] = field(default_factory=list)
    """Lengths, in tokens."""
    anonymous: int = 0
    """Prompt tokens of turns without a conversation id."""

    async def turns(
        self, conversation: str, count: int = 1, messages: list[Json] | None = None, **more: str
    ) -> list[Json]:
        """So many turns of a conversation, each on a connection of its own; what was said, to be gone on with.

        ``more`` are headers, with underscores for dashes.
        """
        said = list(messages or [])
        for _ in range(count):
            said.append(user(OPENING if not said else "And what came of it?"))
            body = chat(said, stream=True, stream_options={"include_usage": True})
            headers = {name.replace("_", "-"): value for name, value in more.items()}
            headers |= {"authorization": f"Bearer {KEY}"} | (
                {"x-conversation-id": conversation} if conversation else {}
            )
            async with httpx.AsyncClient(timeout=GENEROUS) as client:
                response = await client.post(f"{self.url}{CHAT}", json=body, headers=headers)
            assert response.status_code == 200, response.text
            chunks = chunks_of(response.text)
            said.append({name: value for name, value in joined(chunks, CHAT).items() if value is not None})
            self.outcomes.setdefault(conversation, []).append(response.headers["x-turnback-reuse"])
            reused = int(response.headers["x-turnback-reused-tokens"])
            prompt = chunks[-1]["usage"]["prompt_tokens"]
            self.reused += reused
            self.prompts.append(prompt)
            if conversation:
                self.computed += prompt - reused
            else:
                self.anonymous += prompt
        return said


def shown(conversation: str) -> str:
    """How the page names it."""
    return conversation_key(derive_secret(SECRET), f"Bearer {KEY}", "sim-model", conversation)[:12]


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if 0 < part / whole < 0.1 else f"{100 * part / whole:.0f} %"


async def test_the_numbers_are_those_of_the_turns() -> None:
    arguments = ("--secret", SECRET, "--admin-key", "admin", "--retained-watch-interval", "0.1")
    async with serving(*arguments, **SLOW_PREFILL) as command:
        talk = Talk(command.url)
        names = [f"private-{number}" for number in range(6)]
        for name in names:
            said = await talk.turns(name, 2)
        await talk.turns(names[-1], 1, said, x_turnback_reuse="off", x_turnback_admin_key="admin")
        earlier, whole = talk.prompts[-2:]
        await talk.turns("")
        async with looking(command.url) as looked:
            await looked.shows(
                "outcomes",
                [
                    ["hit", "6", "43 %", "all_held"],
                    ["first", "6", "43 %", "nothing_retained"],
                    ["none", "1", "7.1 %", "no_conversation_id"],
                    ["off", "1", "7.1 %", "reuse_off"],
                ],
            )
            every = talk.reused + talk.computed + talk.anonymous
            fates = [row[1:] for row in await looked.rows("tokens")]
            again = int(fates[1][0])
            # All of the turn before, known to the last whole step of 16, and its answer.
            assert earlier - 16 < again < whole
            counted = (talk.reused, again, talk.computed - again, talk.anonymous)
            assert fates == [[f"{tokens:,}", percent(tokens, every)] for tokens in counted]
            ((context, reused, plain, verdict),) = await looked.rows("ttft")
            assert (context, reused.split()[2:], plain.split()[2:]) == ("up to 1k", ["6", "turns"], ["8", "turns"])
            assert verdict.endswith("times as fast")
            sentence = (await looked.page.locator("#verdict").inner_text()).replace("\xa0", " ")
            assert sentence.startswith("Reuse pays here: at up to 1k tokens")
            assert " ".join(reused.split()[:2]) + " with reuse and " + " ".join(plain.split()[:2]) in sentence
            assert f"{percent(talk.reused, every)} of prompt tokens were not computed again" in sentence
            assert "6 of 14 turns reused something" in sentence

            newest = await looked.rows("newest")
            assert [row[0] for row in newest] == ["no id", *map(shown, reversed(names))]
            assert [row[1] for row in newest] == [
                "none no_conversation_id", "first, hit, off reuse_off", *["first, hit all_held"] * 5,
            ]  # fmt: skip
            assert {row[2] for row in newest[2:]} == {"2"}
            assert {row[8] for row in newest} == {"200"}

            await expect(looked.page.locator("#state")).to_contain_text("Ready · 2 of 2 workers up · 0 turns running")
            prefill, decode = await looked.rows("workers")
            assert prefill[1:4] == ["prefill", "up", "0"]
            decoding = command.decode.url.removeprefix("http://")
            assert decode[:4] == [decoding, "decode", "up", "0"]
            held = sum(retained.num_tokens for retained in command.decode.retained)
            share = percent(sum(len(retained.blocks) for retained in command.decode.retained), 1024)
            row = looked.page.locator("#retained tbody tr")
            await expect(row.locator("th, td")).to_have_text(
                [decoding, "6", f"{held:,} of {1024 * 16:,}", share, re.compile(r"^[\d.]+ %$")]
            )


async def test_who_asked_and_what_was_said_is_not_to_be_found() -> None:
    async with serving("--secret", SECRET) as command:
        talk = Talk(command.url)
        said = await talk.turns("private-and-confidential", 2)
        async with looking(command.url) as looked, httpx.AsyncClient(timeout=GENEROUS) as client:
            await expect(looked.page.locator("#newest")).to_contain_text(shown("private-and-confidential"))
            addresses = {*looked.asked, f"{command.url}/dashboard/data"}
            texts = [await looked.page.content(), *[(await client.get(address)).text for address in addresses]]
            hidden = ["private-and", KEY, SECRET, OPENING[:20], *(message["content"][:20] for message in said)]
            assert not [(text[:80], word) for text in texts for word in hidden if word in text]


async def test_the_last_minutes_are_told_apart_from_the_whole(house: House) -> None:
    talk = Talk(house.proxy.url)
    await talk.turns("before", 2)
    async with looking(talk.url) as looked:
        await looked.shows("outcomes", [["hit", "1", "50 %", "all_held"], ["first", "1", "50 %", "nothing_retained"]])
        await looked.page.get_by_label("the last 5 minutes").check()
        await looked.shows("outcomes", [["nothing yet"]])
        await expect(looked.page.locator("#verdict")).to_contain_text("Not enough turns yet")
        await talk.turns("after")
        await looked.shows("outcomes", [["first", "1", "100 %", "nothing_retained"]])
        await looked.page.get_by_label("since the router started").check()
        await looked.shows("outcomes", [["hit", "1", "33 %", "all_held"], ["first", "2", "67 %", "nothing_retained"]])


async def test_it_says_so_when_the_router_does_not_answer_and_when_it_does_again(house: House) -> None:
    async with looking(house.proxy.url, answers=False) as looked:
        alert = looked.page.get_by_role("alert")
        await expect(alert).to_be_hidden()

        async def refuse(route: Route) -> None:
            await route.abort("connectionrefused")

        await looked.page.route("**/dashboard/data", refuse)
        await expect(alert).to_contain_text("The router does not answer since")
        await expect(alert).to_contain_text("What is shown is from")
        assert len(await looked.rows("workers")) == 2
        await looked.page.unroute("**/dashboard/data")
        await expect(alert).to_be_hidden()


async def test_a_page_that_nobody_sees_asks_nothing(house: House) -> None:
    async with chromium() as browser:
        page = await browser.new_page()
        await page.clock.install()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        await page.goto(f"{house.proxy.url}/dashboard")
        await expect(page.locator("#workers tbody tr").first).to_be_visible()
        await page.clock.run_for(2_000)
        await eventually(lambda: asked.count("data") >= 2)
        turn = "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        turn += " document.dispatchEvent(new Event('visibilitychange')); }"
        await page.evaluate(turn, True)
        before = asked.count("data")
        await page.clock.run_for(60_000)
        assert asked.count("data") == before
        await page.evaluate(turn, False)
        await eventually(lambda: asked.count("data") > before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_is_legible_in_light_and_dark_and_fits_a_phone(house: House, scheme: str) -> None:
    talk = Talk(house.proxy.url)
    for number in range(3):
        await talk.turns(f"c{number}", 2)
    backs = {"light": "rgb(246, 247, 246)", "dark": "rgb(18, 22, 20)"}
    async with looking(talk.url, color_scheme=scheme) as looked:
        page = looked.page
        await expect(page.locator("#newest tbody tr")).to_have_count(3)
        assert await page.evaluate("() => getComputedStyle(document.body).backgroundColor") == backs[scheme]
        contrasts = await page.evaluate(CONTRASTS)
        assert len(contrasts) > 50
        assert not [found for found in contrasts if found[0] < 4.5]
        for width in (1280, 768, 360, 320):
            await page.set_viewport_size({"width": width, "height": 800})
            inside, seen = await page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
            assert inside <= seen == width
        # Still tables to who listens to them.
        table = page.get_by_role("table", name="Turns by outcome")
        await expect(table.get_by_role("columnheader", include_hidden=True)).to_have_text(
            ["outcome", "turns", "share", "why"]
        )
        row = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name="hit"))
        await expect(row.get_by_role("cell")).to_have_text(["3", "50 %", "all_held"])


async def test_a_worker_that_is_down_is_told_in_words(house: House) -> None:
    async with looking(house.proxy.url) as looked:
        await expect(looked.page.locator("#workers tbody")).not_to_contain_text("down")
        await house.decode.stop()
        await expect(looked.page.locator("#workers tbody tr").nth(1)).to_contain_text("down")
        await expect(looked.page.locator("#state")).to_contain_text("1 of 2 workers up")


async def test_the_browser_is_told_to_load_nothing_from_elsewhere(house: House) -> None:
    for path in ("/dashboard", "/dashboard/page.js", "/dashboard/page.css", "/dashboard/data"):
        response = await house.proxy.client.get(path)
        assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; "), path
        assert response.headers["x-content-type-options"] == "nosniff"
    for path in ("/dashboard/no.js", "/dashboard/..%2ffigures.py", "/dashboard/figures.py"):
        assert (await house.proxy.client.get(path)).status_code == 404
    async with chromium() as browser:
        page = await browser.new_page()
        await page.add_init_script(WATCH_POLICY)
        await page.goto(f"{house.proxy.url}/dashboard")
        # That other tests see no violation tells something only if it would be seen.
        tried = "(url) => fetch(url).then(() => 'loaded', () => 'refused')"
        assert await page.evaluate(tried, house.decode.url) == "refused"
        assert await page.evaluate("() => window.violations") == ["connect-src"]


async def test_however_many_look_the_figures_are_put_together_once_a_second(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.routes.dashboard._FRESH_SECONDS", 60.0)
    await Talk(house.proxy.url).turns("c")
    answers = await asyncio.gather(*(house.proxy.client.get("/dashboard/data") for _ in range(20)))
    assert len({answer.json()["at"] for answer in answers}) == 1


# --- several processes


async def newest_by_each(command: Command, times: int = 12) -> list[list[str]]:
    """What the newest turns are by whichever process answers, on new connections."""
    found = []
    for _ in range(times):
        async with httpx.AsyncClient(timeout=GENEROUS) as client:
            data = (await client.get(f"{command.url}/dashboard/data")).json()
        found.append([turn["conversation"] for turn in data["newest"]])
    return found


def folder_of(pid: int) -> Path:
    """Where the processes share what they tell."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    (folder,) = [one.partition("=")[2] for one in variables if one.startswith("PROMETHEUS_MULTIPROC_DIR=")]
    return Path(folder)


async def test_several_processes_show_what_all_of_them_did(redis_url: str) -> None:
    arguments = ("--workers", "2", "--store", redis_url, "--secret", SECRET)
    async with serving(*arguments, **SLOW_PREFILL) as command:
        processes = serving_children(command)
        folder = folder_of(min(processes))
        talk = Talk(command.url)
        # Which process takes a connection is the system's choice: until both have had some.
        for rounds in range(100):
            await asyncio.gather(*(talk.turns(f"c{rounds}-{number}") for number in range(4)))
            if {f"newest-{pid}.json" for pid in processes} <= set(os.listdir(folder)):
                break
        names = [f"d{number}" for number in range(5)]
        for name in names:
            await talk.turns(name, 2)
        wanted = [shown(name) for name in reversed(names) for _ in range(2)]

        async def all_agree() -> bool:
            return all(found[: len(wanted)] == wanted for found in await newest_by_each(command))

        await eventually(all_agree)
        outcomes = Counter(outcome for told in talk.outcomes.values() for outcome in told)
        async with looking(command.url) as looked:
            await eventually(lambda: told_outcomes(looked, outcomes))

        # One dies, and something unreadable lies about.
        os.kill(min(processes), signal.SIGKILL)
        (folder / "newest-1.json").write_bytes(b"[{")
        await eventually(lambda: len(serving_children(command) - processes) == 1)
        await eventually(all_agree)
        async with looking(command.url) as looked:
            await eventually(lambda: told_outcomes(looked, outcomes))


async def told_outcomes(looked: Looked, outcomes: Counter[str]) -> bool:
    """Whether the page shows so many turns of each."""
    rows = await looked.rows("outcomes")
    return {row[0]: row[1] for row in rows} == {outcome: str(turns) for outcome, turns in outcomes.items()}

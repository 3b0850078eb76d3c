"""What the page works out of the router's counts, in the browser, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page

from proxy.settings import Settings
from proxy.worker_spec import WorkerSpec
from tests.chromium import chromium
from tests.running import running

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]

BOUNDS = [0.1, 0.2, 0.4]
"""Of buckets that end at 0.1, 0.2 and 0.4 s, and one that does not end."""
CALL = "([name, ...given]) => import('./dashboard/figures.js').then((figures) => figures[name](...given))"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[Page]:
    settings = Settings(prefill=[WorkerSpec("http://127.0.0.1:1")], decode=[WorkerSpec("http://127.0.0.1:2")])
    async with running(settings) as proxy, chromium() as browser:
        page = await browser.new_page()
        await page.goto(f"{proxy.url}/dashboard")
        yield page


def outcome(name: str, turns: int, reason: str = "why") -> Json:
    return {"outcome": name, "reason": reason, "turns": turns}


def context(name: str, reused: list[int], plain: list[int]) -> Json:
    return {"context": name, "reused": reused, "plain": plain}


def counts(turns: list[Json], contexts: list[Json], **tokens: int) -> Json:
    fates = {"reused": 0, "recomputed": 0, "new": 0, "unknown": 0} | tokens
    return {"turns": turns, "prompt_tokens": fates, "ttft": {"bounds": BOUNDS, "contexts": contexts}}


@pytest.mark.parametrize(
    ("buckets", "bucket", "seconds"),
    [
        # The 5th of 10 is the 3rd of 6 in its bucket: half way from 0.1 to 0.2.
        ([2, 6, 2, 0], 1, 0.15),
        # The first bucket begins at 0.
        ([4, 0, 0, 0], 0, 0.05),
        # Exactly at the edge of two.
        ([5, 0, 5, 0], 0, 0.1),
        # The 1.5th of 3 is the 0.5th of 2: a quarter from 0.2 to 0.4.
        ([1, 0, 2, 0], 2, 0.25),
        ([0, 0, 1, 0], 2, 0.3),
    ],
)
async def test_a_median_is_interpolated_in_its_bucket(
    page: Page, buckets: list[int], bucket: int, seconds: float
) -> None:
    found = await page.evaluate(CALL, ["median", BOUNDS, buckets])
    assert found == {"bucket": bucket, "seconds": pytest.approx(seconds)}


async def test_a_median_without_turns_or_beyond_the_last_bound_has_no_number(page: Page) -> None:
    assert await page.evaluate(CALL, ["median", BOUNDS, [0, 0, 0, 0]]) is None
    assert await page.evaluate(CALL, ["median", BOUNDS, [1, 0, 0, 3]]) == {"bucket": 3, "seconds": float("inf")}


async def test_what_came_since_is_the_difference(page: Page) -> None:
    then = counts(
        [outcome("hit", 3), outcome("first", 2)], [context("<=1k", [1, 0, 0, 0], [0, 2, 0, 0])], reused=100, new=50
    )
    now = counts(
        [outcome("hit", 5), outcome("first", 2), outcome("none", 1)],
        [context("<=1k", [2, 0, 0, 0], [0, 2, 1, 0]), context("1k-2k", [0, 1, 0, 0], [0, 0, 0, 0])],
        reused=160, new=70, unknown=5,
    )  # fmt: skip
    assert await page.evaluate(CALL, ["since", then, now]) == counts(
        [outcome("hit", 2), outcome("none", 1)],
        [context("<=1k", [1, 0, 0, 0], [0, 0, 1, 0]), context("1k-2k", [0, 1, 0, 0], [0, 0, 0, 0])],
        reused=60, new=20, unknown=5,
    )  # fmt: skip
    assert not await page.evaluate(CALL, ["restarted", then, now])
    assert await page.evaluate(CALL, ["restarted", now, then])
    assert await page.evaluate(CALL, ["restarted", then, counts([], [])])


async def test_outcomes_are_told_in_order_with_their_shares(page: Page) -> None:
    turns = [
        outcome("first", 1),
        outcome("hit", 6),
        outcome("unsupported", 1, "echo"),
        outcome("unsupported", 2, "media"),
    ]
    assert await page.evaluate(CALL, ["mix", turns]) == [
        {"outcome": "hit", "turns": 6, "share": 0.6, "reasons": [{"reason": "why", "turns": 6}]},
        {"outcome": "first", "turns": 1, "share": 0.1, "reasons": [{"reason": "why", "turns": 1}]},
        {"outcome": "unsupported", "turns": 3, "share": 0.3, "reasons": [
            {"reason": "media", "turns": 2}, {"reason": "echo", "turns": 1},
        ]},
    ]  # fmt: skip


SOONER = context("4k-8k", [10, 0, 0, 0], [0, 0, 10, 0])
LATER = context("<=1k", [0, 6, 0, 0], [6, 0, 0, 0])
SAME = context("1k-2k", [0, 6, 0, 0], [0, 9, 0, 0])
FEW = context("8k-16k", [4, 0, 0, 0], [0, 0, 90, 0])
OFF = context("<=1k", [0, 0, 0, 0], [7, 0, 0, 0])
TURNS = [outcome("hit", 8), outcome("partial", 2), outcome("first", 10)]

TTFT = "the median time to the first token is"
IS_SOONER = f"at 4k to 8k tokens {TTFT} 50 ms with reuse and 0.30 s without"
IS_LATER = f"at up to 1k tokens {TTFT} 0.15 s with reuse and 50 ms without"
IS_SAME = f"at 1k to 2k tokens {TTFT} 0.15 s with reuse and 0.15 s without"
SAVED = "62 % of prompt tokens were not computed again."
HALF = f"{SAVED} 10 of 20 turns reused something."
NEEDED = "To compare, it takes 5 streams with reuse and 5 without, of about the same length"


@pytest.mark.parametrize(
    ("turns", "contexts", "answer", "text"),
    [
        (TURNS, [SOONER, SAME], "yes", f"Reuse pays here: {IS_SOONER}. {HALF}"),
        (TURNS, [LATER], "no", f"Reuse does not pay here: {IS_LATER}. {HALF}"),
        (TURNS, [SAME], "no", f"Reuse makes no clear difference here: {IS_SAME}. {HALF}"),
        (
            TURNS, [LATER, SOONER], "mixed",
            f"Reuse pays at some context lengths and not at others: {IS_SOONER}, but {IS_LATER}. {HALF}",
        ),
        (
            [outcome("hit", 10), outcome("first", 1990)], [SOONER], "rarely",
            f"Reuse pays where it happens, but that is rare: {IS_SOONER}. {SAVED} 10 of 2,000 turns reused something.",
        ),
        (
            TURNS, [FEW], "unknown",
            f"Not enough turns yet. {NEEDED}; at 8k to 16k tokens there were 4 and 90.",
        ),
        ([], [], "unknown", f"Not enough turns yet. {NEEDED}; there were none."),
        ([outcome("off", 7)], [OFF], "unknown", "Reuse is switched off."),
    ],
    ids=["pays", "does not", "no difference", "mixed", "rarely", "too few", "none", "off"],
)  # fmt: skip
async def test_does_it_pay(page: Page, turns: list[Json], contexts: list[Json], answer: str, text: str) -> None:
    counted = counts(turns, contexts, reused=620, recomputed=80, new=250, unknown=50)
    assert await page.evaluate(CALL, ["verdict", counted]) == {"answer": answer, "text": text}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.0042, "4.2 ms"), (0.063, "63 ms"), (0.1, "0.10 s"), (0.7649, "0.76 s"), (12.34, "12.3 s"),
     (250, "4 min 10 s")],
)  # fmt: skip
async def test_times_are_spelled_for_people(page: Page, seconds: float, words: str) -> None:
    assert await page.evaluate(CALL, ["seconds", seconds]) == words


@pytest.mark.parametrize(
    ("share", "words"), [(0, "0 %"), (0.0002, "0.1 %"), (0.042, "4.2 %"), (0.624, "62 %"), (1, "100 %")]
)
async def test_shares_are_spelled_for_people(page: Page, share: float, words: str) -> None:
    assert await page.evaluate(CALL, ["percent", share]) == words


@pytest.mark.parametrize(
    ("worker", "good", "text"),
    [
        ({"up": True}, True, "up"),
        ({"down": True}, False, "down"),
        ({}, False, "not asked yet"),
        ({"up": True, "draining": True}, False, "drains: no new work"),
        ({"down": True, "draining": True}, False, "down, drains: no new work"),
        ({"up": True, "figures": {"breaker_open": True}}, False, "keeps failing: sent nothing for a while"),
    ],
)
async def test_a_worker_is_told_in_words(page: Page, worker: Json, good: bool, text: str) -> None:
    told = {"up": False, "down": False, "draining": False, "figures": {"breaker_open": False}} | worker
    assert await page.evaluate(CALL, ["state", told]) == {"good": good, "text": text}


async def test_turns_are_gathered_by_conversation(page: Page) -> None:
    turns = [
        {"conversation": "b", "outcome": "hit", "turn": 2},
        {"conversation": "", "outcome": "none", "turn": 1},
        {"conversation": "a", "outcome": "expired", "turn": 2},
        {"conversation": "", "outcome": "none", "turn": 1},
        {"conversation": "b", "outcome": "first", "turn": 1},
    ]
    found = await page.evaluate(CALL, ["conversations", turns])
    assert [(one["newest"]["conversation"], one["outcomes"]) for one in found] == [
        ("b", ["first", "hit"]), ("", ["none"]), ("a", ["expired"]), ("", ["none"]),
    ]  # fmt: skip

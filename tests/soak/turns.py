"""One turn of a client, compared with the truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.contract.answers import CHAT, joined, message_of
from tests.soak.house import House
from tests.soak.talk import Conversation, body
from tests.soak.trouble import Trouble

Json = dict[str, Any]

_LEAVES = 0.05
_SLOW = 0.03


@dataclass
class Clients:
    """All clients; ``counts`` tells what became of their turns, ``wrong`` what must not have."""

    house: House
    trouble: Trouble
    chance: Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    """Turns whose clients hung up."""

    async def turn(self, conversation: Conversation, number: int) -> None:
        """One turn, or a part of it."""
        messages = conversation.next(self.chance)
        sent = body(messages, number, self.chance)
        name: str = sent["user"]
        self.trouble.running.add(name)
        self.trouble.begun[name] = time.monotonic()
        try:
            asking = asyncio.create_task(self._ask(conversation, messages, sent))
            if self.chance.random() < _LEAVES:
                await asyncio.wait((asking,), timeout=self.chance.random() ** 2 * 0.2)
                if asking.cancel():
                    self.left.add(name)
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        finally:
            self.trouble.running.discard(name)
            self.counts["left" if name in self.left else "stayed"] += 1

    async def _ask(self, conversation: Conversation, messages: list[Json], sent: Json) -> None:
        url = self.chance.choice(self.house.proxies) + CHAT
        slow = self.chance.random() < _SLOW
        name: str = sent["user"]
        text, status, outcome = "", 0, "none"
        try:
            async with self.house.client.post(
                url, json=sent, headers={"x-conversation-id": conversation.name}
            ) as response:
                status, outcome = response.status, response.headers.get("x-turnback-reuse", "none")
                async for data in response.content.iter_any():
                    text += data.decode()
                    if slow:
                        await asyncio.sleep(0.03)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._fail(name, f"no answer: {type(error).__name__} {error}")
            return
        if status != 200:
            self._fail(name, f"status {status}: {text[:300]}")
            return
        truth = message_of(await self.house.decode[0].cold_answer(sent), CHAT)
        if not sent.get("stream"):
            self._compare(conversation, messages, name, outcome, message_of(json.loads(text), CHAT), truth)
            return
        events = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
        chunks = [event for event in events if "choices" in event and "error" not in event]
        answer = joined(chunks, CHAT)
        if any("error" in event for event in events):
            self._broken(name, answer, truth, events)
        elif not text.endswith("data: [DONE]\n\n"):
            self._fail(name, f"a stream that ended without its end, or an error: {text[-200:]}")
        else:
            self._compare(conversation, messages, name, outcome, answer, truth)

    def _compare(
        self, conversation: Conversation, messages: list[Json], name: str, outcome: str, answer: Json, truth: Json
    ) -> None:
        if answer != truth:
            self._fail(name, f"WRONG ({outcome}): {answer} instead of {truth}")
            return
        self.counts[outcome] += 1
        conversation.said(messages, answer)

    def _broken(self, name: str, answer: Json, truth: Json, events: list[Json]) -> None:
        """A stream that ended with an error: only if its worker failed it when it had begun."""
        began = len(events) > 1
        begins_right = all((truth[part] or "").startswith(answer[part] or "") for part in ("content", "reasoning"))
        if not begins_right:
            self._fail(name, f"WRONG before it broke off: {answer} instead of {truth}")
        elif began and (" mid_stream of decodes" in self.trouble.struck.get(name, "") or name in self.trouble.killed):
            self.counts["broken off by its worker"] += 1
        else:
            self._fail(name, f"broken off: {events[-1]}")

    def _fail(self, name: str, what: str) -> None:
        self.wrong.append(f"{name} (struck by: {self.trouble.struck.get(name)}): {what}")

"""The soak itself: chapters of turns under trouble, and after each the accounts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from urllib.parse import quote

from tests.contract.fleet import LEASE, TTL
from tests.running import eventually
from tests.soak.house import House, house
from tests.soak.talk import Conversation
from tests.soak.trouble import Trouble
from tests.soak.turns import Clients

CONVERSATIONS = 200
CHAPTER = 1000
"""Turns between two accounts."""
AT_ONCE = 24
_SETTLED_WITHIN = 20.0
_OUTLIVED = 2.0
"""Seconds for what goes on in the background when all turns are over: releases, and what clients left."""


@dataclass
class Result:
    """What a soak found. ``wrong`` is empty if all was well."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(f"{what} {number}" for what, number in sorted(self.counts.items()))
        return f"seed {self.seed}: {told}"


async def soak(seed: int, turns: int, conversations: int = CONVERSATIONS) -> Result:
    """So many turns by ``seed``. Whether a fault meets a turn also depends on timing, so a seed replays what is
    tried, not each moment of it."""
    chance = Random(seed)
    result = Result(seed)
    async with house() as made:
        everybody = [Conversation(f"c{number}") for number in range(conversations)]
        for begin in range(0, turns, CHAPTER):
            trouble = Trouble(made, Random(chance.random()))
            clients = Clients(made, trouble, Random(chance.random()))
            await _chapter(clients, everybody, range(begin, min(begin + CHAPTER, turns)), chance)
            await trouble.over()
            result.wrong += clients.wrong
            result.wrong += await _accounts(made, clients, everybody)
            result.counts += clients.counts
            result.counts["struck"] += len(trouble.struck)
            result.counts["lost with the store"] += len(trouble.lost)
            for engine in made.engines:
                engine.requests.clear()
                engine.probes.clear()
        result.wrong += [f"log: {line}" for line in made.complaints()]
    return result


async def _chapter(clients: Clients, everybody: list[Conversation], numbers: range, chance: Random) -> None:
    left = iter(numbers)

    async def client() -> None:
        for number in left:
            clients.trouble.stir()
            conversation = chance.choice(everybody)
            if chance.random() < 0.05:
                # Two turns of one conversation at once.
                await asyncio.gather(clients.turn(conversation, number), clients.turn(conversation, number + 10**9))
            else:
                await clients.turn(conversation, number)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


async def _accounts(made: House, clients: Clients, everybody: list[Conversation]) -> list[str]:
    """What is held that should not be: beside the entries; after they are deleted; when all times have run out."""
    try:
        await eventually(made.up)
        await eventually(made.at_rest)
    except AssertionError:
        states = [await made.get(f"{proxy}/ready") for proxy in made.proxies]
        return [f"not all up, or still at work: {await made.at_work()}, {states}"]
    await asyncio.sleep(_OUTLIVED)
    made.cluster.clock.advance(LEASE)
    wrong = await _settled(made, clients, "beside the entries")
    for conversation in everybody:
        url = f"{made.proxies[0]}/v1/conversations/{quote(conversation.name)}?model=sim-model"
        async with made.client.delete(url) as response:
            if response.status not in (200, 404):
                wrong.append(f"DELETE {conversation.name}: {response.status}")
    wrong += await _settled(made, clients, "after all were deleted")
    made.cluster.clock.advance(TTL)
    wrong += [f"held for ever on {engine.name}: {engine.held()}" for engine in made.engines if engine.held()]
    wrong += [f"hazard: {hazard}" for hazard in made.cluster.hazards if hazard.kind != "late-notification"]
    made.cluster.hazards.clear()
    return wrong


async def _settled(made: House, clients: Clients, when: str) -> list[str]:
    end = time.monotonic() + _SETTLED_WITHIN
    wrong = await _surplus(made, clients)
    for _ in range(100):
        if not wrong or time.monotonic() > end:
            break
        await asyncio.sleep(0.2)
        wrong = await _surplus(made, clients)
    return [f"held {when}: {what}" for what in wrong]


async def _surplus(made: House, clients: Clients) -> list[str]:
    """What decode retains, no entry tells of, and nothing excuses."""
    told = await made.entries()
    found = []
    for engine in made.decode:
        for kept in engine.retained:
            request = next((r for r in engine.requests if kept.request_id in r.request_ids), None)
            turn = "" if request is None else str(request.json.get("user", ""))
            takeover = request is not None and request.json.get("max_tokens") == 1
            place = (engine.url, len(kept.blocks))
            if _excused(clients, kept.request_id, turn, takeover=takeover):
                continue
            if told[place]:
                told[place] -= 1
            else:
                trouble = clients.trouble
                found.append(
                    f"{engine.name}: {kept.request_id}, {len(kept.blocks)} blocks, of {turn}"
                    f" (struck by {trouble.struck.get(turn)}; {trouble.when(turn)})"
                )
    return found


def _excused(clients: Clients, request_id: str, turn: str, *, takeover: bool) -> bool:
    """Whether only time frees it: what the store forgot, and what decode finished when its answer could not reach
    anybody, as the client had left, or the connection was cut just then."""
    trouble = clients.trouble
    unseen = turn in clients.left and not takeover
    cut = " of decodes" in trouble.struck.get(turn, "")
    return unseen or cut or request_id in trouble.lost or turn in trouble.killed

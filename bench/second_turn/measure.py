"""Serve the same conversations in every arm, in turns, and note what their second turns took."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from bench.failure import BenchFailure
from bench.second_turn.arms import Arm, Turn
from bench.second_turn.bare import common_prefix
from bench.second_turn.conversation import Conversation
from bench.second_turn.engines import READ_FROM_OTHERS, at_rest, metric
from router.fingerprint import STEP

PAUSE_SECONDS = 0.5
"""Between two turns, in every arm: so that none is measured while the turn before is being cleared up."""


@dataclass(frozen=True)
class Second:
    """A second turn."""

    turn: Turn
    reusable: int
    """Tokens that decode held and the new prompt begins with."""


@dataclass(frozen=True)
class Engines:
    """The engines behind all arms, by their URLs."""

    session: aiohttp.ClientSession
    prefill: str
    decode: str

    async def at_rest(self) -> None:
        """Wait until decode retains nothing."""
        await at_rest(self.session, self.decode)

    async def read_by_prefill(self) -> float:
        """Tokens whose KV prefill has read from decode since it started."""
        return await metric(self.session, self.prefill, READ_FROM_OTHERS)


async def serve(arm: Arm, conversation: Conversation, engines: Engines) -> Second:
    """Both turns of ``conversation``. Raises ``BenchFailure`` unless reuse was exactly what ``arm`` is for.

    Decode retains nothing before and after it, and between the turns only what is reused.
    """
    first = (await arm.turn(conversation.name, conversation.first)).answer
    if not arm.reuse:
        await engines.at_rest()
    await asyncio.sleep(PAUSE_SECONDS)
    read_before = await engines.read_by_prefill()
    turn = await arm.turn(conversation.name, conversation.second(first.text))
    read = int(await engines.read_by_prefill() - read_before)
    held = (first.prompt_ids + first.ids)[:-1]
    second = Second(turn, min(common_prefix(held, turn.answer.prompt_ids), len(turn.answer.prompt_ids) - 1))
    _check(arm, second, read)
    await arm.end(conversation.name)
    await engines.at_rest()
    return second


def _check(arm: Arm, second: Second, read: int) -> None:
    reused = second.turn.reused
    # The router compares in steps.
    least = second.reusable // STEP * STEP if arm.reuse else 0
    most = second.reusable if arm.reuse else 0
    if not least <= reused <= most or read != reused or (arm.reuse and not reused):
        raise BenchFailure(
            f"{arm.name}: {reused} tokens were reused, and prefill read {read}, where it should have been"
            f" {least} to {most}"
        )


async def round_of(arms: Sequence[Arm], conversation: Conversation, engines: Engines) -> list[Second]:
    """``conversation`` in each of ``arms``, one after the other; results in that order.

    Raises ``BenchFailure`` if they did not have the same prompt.
    """
    seconds = [await serve(arm, conversation, engines) for arm in arms]
    if any(second.turn.answer.prompt_ids != seconds[0].turn.answer.prompt_ids for second in seconds):
        raise BenchFailure("the arms' prompts differ, so their times cannot be compared")
    return seconds

"""Serve conversations in every arm, in turns, and note what each turn took.

All arms send the same messages: the answers in the history are the last arm's, which is the one with reuse, since
only what decode generated itself can be reused. Each turn is served by one arm after the other. Which is first changes
from conversation to conversation, so that a machine that gets slower or faster meets both alike; within one it stays,
so that in the pauses of one arm there is a single turn of the other. Where the server is vLLM each arm
has a `cache_salt` of its own, so that no arm finds in a prefix cache what another one had computed.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import msgspec

from bench.failure import BenchFailure
from bench.multiturn.client import Client, Model
from bench.multiturn.history import History
from bench.multiturn.settings import BenchSettings
from bench.multiturn.stream import Answer, TurnFailed
from bench.multiturn.talk import Json, Made, Part, Talk, Turn
from bench.multiturn.words import Measure
from bench.result import Phase, TurnResult

AS_IT_IS = "as it is"
"""The only arm where nothing is compared."""

ONE_MORE = Turn((Made("user", (Part("one more", 40),)),), 32)
"""What is asked past the TTL."""

_AFTER_TTL_SECONDS = 0.25


@dataclass(frozen=True)
class Arm:
    """A way to be served."""

    name: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)


def arms_of(settings: BenchSettings) -> list[Arm]:
    """Without and with reuse, if there is a key for it; else just one."""
    if settings.admin_key is None:
        return [Arm(AS_IT_IS)]
    key = {"X-Turnback-Admin-Key": settings.admin_key.get_secret_value()}
    return [Arm(name, {"X-Turnback-Reuse": name, **key}) for name in ("off", "on")]


@dataclass
class _Going:
    """A conversation that is being served."""

    number: int
    phase: Phase
    repeat: int
    talk: Talk
    history: History
    turns: int = 0
    """That were begun."""
    ended: dict[str, float] = field(default_factory=dict)
    """When the last answer of each arm did."""
    asked: float = 0.0
    """When the last turn was."""
    broken: bool = False


Observe = Callable[[TurnResult], None]


class Run:
    """One run of the bench; times count from when it is made."""

    def __init__(
        self,
        client: Client,
        model: Model,
        measure: Measure,
        settings: BenchSettings,
        observe: Observe = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``observe`` is told of every turn, ``say`` what people are to know meanwhile."""
        self.began = time.perf_counter()
        self.arms = arms_of(settings)
        self.turns: list[TurnResult] = []
        self._client = client
        self._model = model
        self._measure = measure
        self._settings = settings
        self._vllm = model.vllm if settings.vllm is None else settings.vllm
        self._observe = observe
        self._say = say
        self._name = secrets.token_hex(4)
        self._digest_key = secrets.token_bytes(16)
        self._ids: set[str] = set()

    async def check(self) -> None:
        """Raise ``BenchFailure`` unless the arms are what they are to be."""
        body = {"model": self._model.name, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        for arm in self.arms:
            try:
                answer = await self._client.ask(body, arm.headers)
            except TurnFailed as failure:
                hint = "admin_key: " if failure.status == 403 and arm.headers else ""
                raise BenchFailure(f"{hint}{self._client.url}: {failure}") from failure
            if not arm.headers:
                continue
            if answer.outcome is None:
                raise BenchFailure(f"url: {self._client.url} is no Turnback router; leave admin_key out")
            if (answer.outcome == "off") != (arm.name == "off"):
                raise BenchFailure(
                    f"{self._client.url} was asked for reuse {arm.name} and said {answer.outcome!r}: "
                    "is its reuse switched off, or is it too old for this?"
                )

    async def warm_up(self) -> None:
        """Let the server meet the arms. Times of these turns mean nothing."""
        room = min(self._model.max_length or 4096, self._settings.max_context or 4096)
        for number in range(self._settings.warm_up):
            first = Turn((Made("user", (Part(f"warm-up {number}", min(600, room // 4)),)),), 16)
            await self._serve(self._going(number, "warmup", 0, Talk((first, replace(ONE_MORE, answer_tokens=16)))))

    async def main(self, talks: Sequence[Talk]) -> None:
        """All ``talks``, ``repeat`` times, so many at once as set; then, if set, some of them past the TTL."""
        every = [
            self._going(repeat * len(talks) + place, "main", repeat, talk)
            for repeat in range(self._settings.repeat)
            for place, talk in enumerate(talks)
        ]
        kept = every[len(every) - min(self._settings.past_ttl, len(every)) :]
        waiting = iter(every)
        began = time.perf_counter()

        async def one_after_the_other() -> None:
            for going in waiting:
                await _until(began + going.talk.arrival_seconds)
                await self._serve(going)
                if self._settings.delete_ended and going not in kept:
                    await self._forget(going)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._settings.concurrency, len(every))):
                group.create_task(one_after_the_other())
        await self._past_ttl([going for going in kept if not going.broken])

    async def forget_all(self) -> None:
        """Tell the router that all is over."""
        for conversation in sorted(self._ids):
            await self._client.delete(f"/v1/conversations/{quote(conversation)}")
        self._ids.clear()

    def _going(self, number: int, phase: Phase, repeat: int, talk: Talk) -> _Going:
        return _Going(number, phase, repeat, talk, History(self._measure, f"{phase} {repeat}"))

    async def _past_ttl(self, kept: Sequence[_Going]) -> None:
        ttl = self._settings.ttl
        if ttl is None or not kept:
            return
        over = max(max(going.ended.values()) for going in kept) + ttl + _AFTER_TTL_SECONDS
        self._say(f"Waiting {over - time.perf_counter():.0f} s until the TTL is over")
        await _until(over)
        for going in kept:
            going.phase = "past_ttl"
            await self._turn(going, ONE_MORE)

    async def _serve(self, going: _Going) -> None:
        for turn in going.talk.turns:
            if going.turns:
                await self._pause(going, turn)
            if not await self._turn(going, turn):
                return

    async def _pause(self, going: _Going, turn: Turn) -> None:
        now = time.perf_counter()
        wanted = turn.wait_seconds * self._settings.pause_scale
        passed = now - going.asked if turn.wait_from == "request" else 0.0
        await _until(now + min(max(0.0, wanted - passed), self._settings.max_pause))

    async def _turn(self, going: _Going, turn: Turn) -> bool:
        """Ask in every arm; whether all answered."""
        going.turns += 1
        going.history.say(turn)
        going.asked = time.perf_counter()
        # By rounds, where there are several contexts: else one context would always have the same order.
        rounds = going.number // max(1, len(self._settings.contexts))
        order = self.arms[::-1] if rounds % 2 else self.arms
        answers = {arm.name: await self._ask(going, turn, arm) for arm in order}
        fed = answers[self.arms[-1].name]
        if fed is None or None in answers.values():
            going.broken = True
            return False
        if self._settings.history == "recorded" and turn.recorded_answer is not None:
            going.history.answered(turn.recorded_answer.message)
        else:
            going.history.answered(fed.message)
        return True

    async def _ask(self, going: _Going, turn: Turn, arm: Arm) -> Answer | None:
        began = time.perf_counter()
        told = TurnResult(
            arm=arm.name,
            conversation=going.number,
            turn=going.turns,
            phase=going.phase,
            pause_seconds=began - going.ended[arm.name] if arm.name in going.ended else None,
            started_seconds=began - self.began,
        )
        conversation = self._id(going, arm)
        self._ids.add(conversation)
        answer = None
        try:
            answer = await self._client.ask(
                self._body(going, turn, arm), {"X-Conversation-Id": conversation, **arm.headers}
            )
        except TurnFailed as failure:
            result = msgspec.structs.replace(told, error=str(failure))
        else:
            result = msgspec.structs.replace(
                told,
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.output_tokens,
                reused_tokens=answer.reused_tokens,
                outcome=answer.outcome,
                reason=answer.reason,
                ttft_seconds=answer.ttft,
                tpot_seconds=answer.tpot,
                turn_seconds=answer.seconds,
                answer_digest=hashlib.blake2b(answer.told, digest_size=8, key=self._digest_key).hexdigest(),
            )
        going.ended[arm.name] = time.perf_counter()
        self.turns.append(result)
        self._observe(result)
        return answer

    def _body(self, going: _Going, turn: Turn, arm: Arm) -> Json:
        body: Json = {
            "model": self._model.name,
            "messages": going.history.messages,
            "max_tokens": turn.answer_tokens,
            "temperature": self._settings.temperature,
        }
        if going.talk.tools:
            body["tools"] = list(going.talk.tools)
        if self._vllm:
            body["min_tokens"] = turn.answer_tokens
            body["cache_salt"] = f"{self._name}-{arm.name}-{going.repeat}"
        return body

    def _id(self, going: _Going, arm: Arm) -> str:
        # Past the TTL it is still the same conversation.
        kind = "warmup" if going.phase == "warmup" else "main"
        return f"bench-{self._name}-{kind}-{going.number}-{arm.name.replace(' ', '-')}"

    async def _forget(self, going: _Going) -> None:
        for arm in self.arms:
            conversation = self._id(going, arm)
            self._ids.discard(conversation)
            await self._client.delete(f"/v1/conversations/{quote(conversation)}")


async def _until(moment: float) -> None:
    """Sleep until ``moment`` by ``time.perf_counter``."""
    if (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left)

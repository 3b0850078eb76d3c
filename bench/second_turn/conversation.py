"""Conversations of a given length: a long user message, and a short one after the first answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import aiohttp

Message = dict[str, str]

ANSWER_TOKENS = 32
QUESTION = "Go on, and say what follows from it."
TEMPLATE_TOKENS = 10
"""What the chat template adds to a message, roughly."""

_TEXT = (
    "the value of this function is read from a file when it was not given by the caller and then written back "
    "to the buffer so that every other thread can see what has been changed since the last call returned an error"
)


@dataclass(frozen=True)
class Conversation:
    """Known by ``name``; ``opening`` is the first user message."""

    name: str
    opening: str

    @property
    def first(self) -> list[Message]:
        """The messages of the first turn."""
        return [{"role": "user", "content": self.opening}]

    def second(self, answer: str) -> list[Message]:
        """The messages of the second turn, after ``answer``."""
        return [
            *self.first,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": QUESTION},
        ]


async def conversation(
    session: aiohttp.ClientSession, engine: str, model: str, context: int, seed: str
) -> Conversation:
    """One whose first prompt has ``context`` tokens, give or take a few; the same for the same ``seed``."""
    draw = random.Random(seed)
    # A word is a token or more.
    words = " ".join(draw.choices(_TEXT.split(), k=context))
    tokens = (await _post(session, f"{engine}/tokenize", {"model": model, "prompt": words}))["tokens"]
    cut = tokens[: context - TEMPLATE_TOKENS]
    opening = (await _post(session, f"{engine}/detokenize", {"model": model, "tokens": cut}))["prompt"]
    return Conversation(f"{context}-{seed}", opening)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


def sampling(model: str) -> dict[str, Any]:
    """What every turn of every arm asks for: greedy, a fixed number of tokens, streamed, with token ids."""
    return {
        "model": model,
        "temperature": 0,
        "min_tokens": ANSWER_TOKENS,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }

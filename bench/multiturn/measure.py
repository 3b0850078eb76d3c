"""How long text is on this server: three prompts that it counts."""

from __future__ import annotations

from bench.multiturn.client import Client
from bench.multiturn.words import WORDS, Measure


async def measure(client: Client, model: str) -> Measure:
    """The server's measure. Raises ``BenchFailure`` if it does not tell."""

    async def count(*texts: str) -> int:
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        return await client.count({"model": model, "messages": messages})

    # All words, since some are several tokens: text is made of all of them, equally often.
    text = " ".join(WORDS)
    few = await count(text)
    per_word = max(0.1, (await count(f"{text} {text}") - few) / len(WORDS))
    per_message = max(0.0, (await count(text, WORDS[0], WORDS[0]) - few) / 2 - per_word)
    return Measure(per_word, per_message, max(0.0, few - len(WORDS) * per_word - per_message))

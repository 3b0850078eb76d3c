"""Room for running requests beside what is retained: which entries to give up, and how many.

Retained blocks are not evictable: to the engine they are as good as running requests, and a new one waits
in its queue until they are read, released or expired. An entry is only ever an optimisation, so it goes first.
"""

from collections.abc import Callable, Mapping

import msgspec

from metadata_store.record import Holding

ANSWER_TOKENS = 256
"""Room kept for an answer whose length the client did not bound."""

LONGEST_ANSWER_TOKENS = 2048
"""Room kept for an answer at most: longer ones may have to make room again as they grow."""


class Cache(msgspec.Struct, frozen=True):
    """A decode worker's KV cache."""

    blocks: int
    block_size: int
    """Tokens."""

    def needed(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Blocks that a request will take."""
        answer = ANSWER_TOKENS if max_tokens is None else max(1, min(max_tokens, LONGEST_ANSWER_TOKENS))
        # One more for the block that the engine keeps for itself, and fractions.
        return -(-(prompt_tokens + answer) // self.block_size) + 1

    def held(self, prompt_tokens: int, requests: int) -> int:
        """Blocks that so many running requests take, of so many prompt tokens together."""
        return -(-(prompt_tokens + requests * ANSWER_TOKENS) // self.block_size) + requests


def retained_blocks(entries: Mapping[str, Holding]) -> int:
    """Blocks that entries keep."""
    return sum(holding.blocks for holding in entries.values())


def to_free(entries: Mapping[str, Holding], blocks: int) -> list[str]:
    """Keys of the oldest entries that together keep at least ``blocks`` blocks; all, if they keep fewer."""
    return _oldest_until(entries, blocks, lambda holding: holding.blocks)


def over_share(entries: Mapping[str, Holding], cache: Cache, share: float) -> list[str]:
    """Keys of the oldest entries without which the others keep no more than ``share`` of the cache."""
    return to_free(entries, retained_blocks(entries) - int(cache.blocks * share))


def over_budget(entries: Mapping[str, Holding], tokens: int) -> list[str]:
    """Keys of the oldest entries without which the others hold no more than ``tokens`` tokens."""
    excess = sum(holding.tokens for holding in entries.values()) - tokens
    return _oldest_until(entries, excess, lambda holding: holding.tokens)


def idle(entries: Mapping[str, Holding], now: float, seconds: float) -> list[str]:
    """Keys of entries that nobody came back to for ``seconds``."""
    return [key for key, holding in entries.items() if now - holding.stored_at > seconds]


def _oldest_until(entries: Mapping[str, Holding], excess: int, size: Callable[[Holding], int]) -> list[str]:
    chosen: list[str] = []
    for key, holding in sorted(entries.items(), key=lambda item: item[1].stored_at):
        if excess <= 0:
            break
        chosen.append(key)
        excess -= size(holding)
    return chosen

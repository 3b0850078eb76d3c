"""One request inside an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .model import Attention, Sampling, Writer
from .tokenizer import EOS

Json = dict[str, Any]


@dataclass(eq=False)
class Sequenced:
    """A prompt, what was generated for it, and the blocks it holds."""

    request_id: str
    prompt: tuple[int, ...]
    params: Json | None
    sampling: Sampling
    writer: Writer
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    adapter: int = 0
    salt: str | None = None
    skip_cache: bool = False
    media: Mapping[int, int] = field(default_factory=dict)

    output: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    cached_tokens: int = 0
    external_tokens: int = 0
    computed: int = 0
    tracked: bool = False
    attention: Attention = field(init=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: Json | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def key(self, position: int) -> int:
        """What the model sees at a position: the token, or the content behind a placeholder."""
        if position < len(self.prompt):
            return self.media.get(position, self.prompt[position])
        return self.output[position - len(self.prompt)]

    def keys(self) -> list[int]:
        return [self.key(position) for position in range(self.length)]

    def digests(self, span: int) -> list[int]:
        """The prefix-cache hash of every full block, each over all tokens before its end."""
        digest = hash((self.adapter, self.salt))
        keys = self.keys()
        found = []
        for start in range(0, len(keys) - span + 1, span):
            digest = hash((digest, *keys[start : start + span]))
            found.append(digest)
        return found

    def ended_by(self, token: int, context_length: int) -> str | None:
        """Why a token that was just appended ends the request, if it does."""
        if token == EOS and not self.ignore_eos:
            return "stop"
        if token in self.stop_token_ids and len(self.output) >= self.min_tokens:
            self.stop_reason = token
            return "stop"
        if len(self.output) >= self.max_tokens or self.length >= context_length:
            return "length"
        return None

    @property
    def may_end(self) -> bool:
        return not self.ignore_eos and len(self.output) >= self.min_tokens


def blocks_for(tokens: int, span: int) -> int:
    return -(-tokens // span)


def unpadded(tables: Sequence[Sequence[int]], last: int) -> list[list[int]]:
    """The exchanged part of each group's list: of a sliding-window group only its last blocks."""
    return [list(tables[0]), *(list(table[-last:]) for table in tables[1:])]

"""Workers as decisions see them: what they can do and how they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Capabilities:
    """What one start of one worker was found to offer. Asked again after every restart."""

    generation: str
    """Changes with every start of the worker."""
    block_size: int | None = None
    """Tokens per KV block; None if the worker does not say."""
    num_blocks: int | None = None
    """KV blocks in all; None if the worker does not say."""
    renders: frozenset[str] = frozenset()
    """Dialects whose prompts the worker turns into token ids, exactly as it would for an answer."""
    tokenizes: frozenset[str] = frozenset()
    """Dialects for which ``/tokenize`` was seen to give the same ids as a real request."""
    honours_ids: frozenset[str] = frozenset()
    """Dialects in which the worker was seen to take ``kv_transfer_params.prompt_token_ids`` for the prompt."""


@dataclass
class Worker:
    """One vLLM server in one role, and its present state."""

    url: str
    role: Role
    up: bool = False
    capabilities: Capabilities | None = None
    """None until the worker was probed."""
    in_flight: int = field(default=0)
    """Legs that this process has running on it."""
    in_flight_tokens: int = field(default=0)
    """Prompt tokens of those legs, where they are known."""
    rank: int | None = None
    """Which data-parallel rank behind ``url``; None if the server picks one itself, or has only one."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What every request to it carries: its own key, its rank."""

    @property
    def name(self) -> str:
        """By which it is known everywhere, entries in the store included."""
        return self.url if self.rank is None else f"{self.url}#rank={self.rank}"

    @property
    def generation(self) -> str | None:
        return self.capabilities.generation if self.capabilities else None

    def honours_ids(self, dialect: str) -> bool:
        return self.capabilities is not None and dialect in self.capabilities.honours_ids

"""Workers as decisions see them: what they can do and how they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.breaker import Breaker
from router.health import Health
from router.words import Word

UNKNOWN_GENERATION = "unknown"
"""Of a worker that does not tell when it was started: it may restart unnoticed, so nothing it holds is reused."""


class Role(Word):
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
    render_server: frozenset[str] = frozenset()
    """Dialects in which the render server, where there is one, was seen to make the same prompts as the worker."""
    honours_ids: frozenset[str] = frozenset()
    """Dialects in which the worker was seen to take ``kv_transfer_params.prompt_token_ids`` for the prompt."""


@dataclass(frozen=True)
class Reported:
    """What a worker last said of its load: legs of every router together, and other clients' requests."""

    read_at: float
    """Seconds, on the pool's clock."""
    running: int
    """Requests that the engine is computing."""
    waiting: int
    """Requests in the engine's queue."""
    kv_usage: float | None
    """Share of its KV blocks in use, 0 to 1, retained ones included; None if it does not say."""
    ours: int = 0
    """Legs of this process that were on it at that time."""

    @property
    def others(self) -> int:
        """Requests that are not of this process."""
        return max(0, self.running + self.waiting - self.ours)


@dataclass
class Worker:
    """One vLLM engine in one role, and its present state: a server, or one data-parallel rank of a server."""

    url: str
    """Of its server."""
    role: Role
    capabilities: Capabilities | None = None
    """None until the worker told which start of it this is."""
    discovered: bool = False
    """Whether it was found out what it can do beside that."""
    in_flight: int = 0
    """Legs that this process has running on it."""
    in_flight_tokens: int = 0
    """Tokens that those legs have it compute (prefill) or hold (decode), where they are known or estimated."""
    rank: int | None = None
    """Which data-parallel rank behind ``url``; None if the server picks one itself, or has only one."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What every request to it carries: its own key, its rank."""
    health: Health = field(default_factory=Health)
    breaker: Breaker = field(default_factory=Breaker)
    reported: Reported | None = None
    readers: int = 0
    """Legs of this process on other workers that read what this one holds."""
    draining: bool = False
    """Whether it is to get no new work."""
    last_chosen: int = 0
    """Running number of the choice that it was chosen by last; 0 for never."""
    name: str = field(init=False)
    """By which it is known everywhere, entries in the store included."""

    def __post_init__(self) -> None:
        self.name = self.url if self.rank is None else f"{self.url}#rank={self.rank}"

    @property
    def up(self) -> bool:
        """Whether it answers its health probes."""
        return self.health.up

    @property
    def generation(self) -> str | None:
        return self.capabilities.generation if self.capabilities else None

    def available(self, now: float) -> bool:
        """Whether a leg may be sent to it: it answers its probes, and does not keep failing real traffic."""
        return self.health.up and self.breaker.allows(now)

    def given_up(self, now: float) -> bool:
        """Whether it is known that a leg would fail; not so of a worker that was not probed yet."""
        return self.health.down or not self.breaker.allows(now)

    def honours_ids(self, dialect: str) -> bool:
        return self.capabilities is not None and dialect in self.capabilities.honours_ids

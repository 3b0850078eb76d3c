"""What kind of engine to simulate."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """Settings of one engine. Seconds where a time is meant, tokens where a length is.

    The first block of settings is what an operator sets on vLLM; the second says what the
    version at hand can do; the third is about the simulation itself.
    """

    model: str = "sim-model"
    adapters: tuple[str, ...] = ()
    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int | None = None
    max_running: int = 256
    prefix_caching: bool = True
    bidirectional: bool = True
    decoder_kv_blocks_ttl: float = 480.0
    kv_lease_duration: float = 30.0
    kv_recompute_threshold: int = 64
    num_groups: int = 1
    dcp_size: int = 1
    api_key: str | None = None
    prompt_tokens_details: bool = False
    request_id_headers: bool = False

    streams_carry_kv_params: bool = True
    honours_prompt_token_ids: bool = True
    offers_render: bool = True
    offers_tokenize: bool = True
    expiry_check: bool = True
    version: str = "0.33.0"

    refuses_unknown_reads: bool = False
    """Fail a read of blocks that are not retained under that request id (real engines read)."""
    scrub_freed: bool = True
    """Overwrite freed blocks at once instead of when they are handed out again."""
    unknown_members: bool = True
    """Add members that nobody knows to answers, chunks and KV parameters."""
    forbidden_members: frozenset[str] = field(default_factory=frozenset)
    """Members of a request body that must never reach an engine: 400 if they do."""
    prefill_seconds_per_token: float = 0.0
    decode_seconds_per_token: float = 0.0
    transfer_seconds: float = 0.0

    @property
    def span(self) -> int:
        """Tokens that one block id stands for."""
        return self.block_size * self.dcp_size

    @property
    def context_length(self) -> int:
        room = (self.num_blocks - 1) // self.num_groups * self.span
        return min(self.max_model_len or 131_072, room)

    def check(self) -> None:
        if self.num_groups not in (1, 2):
            raise ValueError("one or two cache groups are simulated")
        if self.num_groups > 1 and self.prefix_caching:
            raise ValueError("a prefix cache over several groups is not simulated")
        if self.num_blocks < 3:
            raise ValueError("too few blocks to hold anything")

"""What vLLM does with the parameters of a prefill leg, down to which token's KV ends up in which block.

Written from vLLM 0.32.0, ``distributed/kv_transfer/kv_connector/v1/nixl`` (``get_num_new_matched_tokens``,
``update_state_after_alloc``, ``_read_blocks``, ``_apply_prefix_caching``, ``_apply_dcp_prefix_caching``) and
``core/sched/scheduler.py``. Like the engine it believes what it is told: it looks at no token.

The KV of a position depends on all tokens up to it, so it is modelled by a digest of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Kv = int
GARBAGE: Kv = -1
"""What lies in a block that was reserved and not written, or beyond the tokens of the last block."""


class Kind(Enum):
    """What a KV cache group keeps."""

    FULL = "full attention: all blocks"
    WINDOW = "sliding window: the last two blocks"
    STATE = "Mamba: one slot, the state after the last token"


WINDOW_BLOCKS = 2


class EngineFails(Exception):
    """An assertion of the engine: the whole prefill request ends with a 500."""


def kv_of(tokens: Sequence[int]) -> list[Kv]:
    """The KV of each position."""
    found: list[Kv] = []
    digest = 7
    for token in tokens:
        digest = hash((digest, token))
        found.append(abs(digest))
    return found


@dataclass(frozen=True)
class Decode:
    """A decode worker that retains the blocks of one answer."""

    block_size: int
    dcp: int
    kinds: tuple[Kind, ...]
    memory: tuple[dict[int, list[Kv]], ...]
    """Per group: what is in each block."""
    params: dict[str, Any]

    @classmethod
    def retaining(
        cls,
        held: Sequence[int],
        *,
        said_tokens: int,
        block_size: int,
        kinds: tuple[Kind, ...] = (Kind.FULL,),
        dcp: int = 1,
        surplus: int = 0,
    ) -> Decode:
        """KV of ``held``, told as ``said_tokens``; lists are ``surplus`` blocks longer than needed, or shorter."""
        unit = block_size * dcp
        kv = kv_of(held)
        needed = -(-len(kv) // unit)
        blocks = [kv[start : start + unit] for start in range(0, len(kv), unit)]
        blocks = [block + [GARBAGE] * (unit - len(block)) for block in blocks]
        blocks = (blocks + [[GARBAGE] * unit] * max(surplus, 0))[: max(needed + surplus, 0)]
        lists, memory = [], []
        for group, kind in enumerate(kinds):
            kept = list(blocks)
            if kind is Kind.WINDOW:
                kept = kept[-WINDOW_BLOCKS:]
            elif kind is Kind.STATE:
                kept = [[kv[-1] if kv else GARBAGE]]
            ids = [1000 * (group + 1) + 7 * index for index in range(len(kept))]
            lists.append(ids)
            memory.append(dict(zip(ids, kept, strict=True)))
        params = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": lists,
            "remote_engine_id": "d-0",
            "remote_request_id": "chatcmpl-1",
            "remote_host": "10.0.0.2",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": dcp,
            "pp_size": 1,
            "remote_num_tokens": said_tokens,
            "remote_blocks_expiry_time": 12345.678,
            "transfer_mode": "read",
        }
        return cls(block_size, dcp, kinds, tuple(memory), params)


@dataclass(frozen=True)
class Computed:
    """What prefill takes as computed before it computes the rest."""

    tokens: int
    wrong: list[tuple[int, int]]
    """(group, position) of KV that is not that of the prompt."""
    from_remote: int


@dataclass(frozen=True)
class Prefill:
    """A prefill worker. ``cached_blocks`` of its own prefix cache match the prompt."""

    block_size: int
    cached_blocks: int = 0
    threshold: int = 0

    def run(self, prompt: Sequence[int], params: dict[str, Any], decode: Decode) -> Computed:
        """One prefill leg with ``params`` as ``kv_transfer_params``. Raises ``EngineFails``."""
        unit = self.block_size * decode.dcp
        # The local cache never covers the whole prompt: the last token is always computed.
        cached = min(self.cached_blocks, (len(prompt) - 1) // unit)
        local = cached * unit
        external = self._matched(prompt, params, local)
        if external == 0:
            return Computed(local, [], 0)
        truth = kv_of(prompt)
        total = local + external
        wrong: list[tuple[int, int]] = []
        lists: list[list[int]] = params["remote_block_ids"]
        if len(lists) != len(decode.kinds):
            raise EngineFails("number of groups")
        for group, kind in enumerate(decode.kinds):
            fresh = list(range(cached, -(-total // unit)))
            if kind is Kind.STATE:
                fresh = fresh[-1:]
            elif kind is Kind.WINDOW:
                fresh = fresh[-WINDOW_BLOCKS:]
            read = self._read(lists[group], decode, group, fresh, cached)
            if kind is Kind.STATE:
                # A full match goes back one token to compute it again; a state cannot.
                if read[fresh[0]] != [truth[total - 1]] or total == len(prompt):
                    wrong.append((group, total - 1))
                continue
            for block in fresh:
                found = read.get(block, [GARBAGE] * unit)
                wrong += [
                    (group, position)
                    for position in range(block * unit, min((block + 1) * unit, total))
                    if found[position - block * unit] != truth[position]
                ]
        return Computed(total - 1 if total == len(prompt) else total, wrong, external)

    def _matched(self, prompt: Sequence[int], params: dict[str, Any], local: int) -> int:
        fields = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if not params.get("do_remote_decode") or not params.get("remote_block_ids"):
            return 0
        if any(field not in params for field in fields):
            return 0
        count = min(params.get("remote_num_tokens") or 0, len(prompt)) - local
        if count <= 0 or (self.threshold > 0 and count < self.threshold):
            return 0
        return count

    def _read(
        self, remote: list[int], decode: Decode, group: int, fresh: list[int], cached: int
    ) -> dict[int, list[Kv]]:
        """What the transfer writes into each of the ``fresh`` local blocks (by index in the sequence)."""
        memory = decode.memory[group]
        if decode.kinds[group] is Kind.STATE:
            if not remote:
                raise EngineFails("no state slot")
            return {fresh[0]: memory[remote[-1]]}
        if decode.dcp > 1:
            # By global position, from the front; what the remote list does not cover stays as it was.
            return {block: memory[found] for block, found in zip(fresh, remote[cached:], strict=False)}
        if self.block_size % decode.block_size:
            raise EngineFails("prefill's blocks are no multiple of decode's")
        ratio = self.block_size // decode.block_size
        local = [(block, part) for block in fresh for part in range(ratio)]
        if ratio > 1:
            local = local[: len(remote)]
        if len(local) > len(remote):
            raise EngineFails("fewer remote blocks than local ones")
        # Both lists are lined up at their tails.
        remote = remote[len(remote) - len(local) :]
        written: dict[int, list[Kv]] = {}
        for (block, _), found in zip(local, remote, strict=True):
            written.setdefault(block, []).extend(memory[found])
        return {block: kv + [GARBAGE] * (self.block_size - len(kv)) for block, kv in written.items()}

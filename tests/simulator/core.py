"""The engine behind the API: a queue, the computing of prompts and answers, and what is kept."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from .loading import external_tokens, load, window_blocks
from .memory import Memory
from .model import SLIDING_WINDOW, Attention, true_values
from .options import Options
from .retention import Retention
from .sequence import Sequenced, blocks_for, unpadded
from .storage import NULL_BLOCK
from .transfer import EngineDied, names_remote

if TYPE_CHECKING:
    from .cluster import Cluster

Json = dict[str, Any]


class Core:
    """One engine process; a restart makes a new one."""

    def __init__(self, cluster: Cluster, name: str, options: Options, host: str, port: int) -> None:
        self.name = name
        self.options = options
        self.engine_id = str(uuid.uuid4())
        self.host, self.port = host, port
        self.memory = Memory(cluster, name, options)
        self.waiting: list[Sequenced] = []
        self.running: list[Sequenced] = []
        self.crashed: str | None = None
        self.computed_tokens = 0
        self.pulled_tokens = 0
        self._cluster = cluster

    # --- running a request -------------------------------------------------------------

    async def generate(self, seq: Sequenced) -> AsyncGenerator[int, None]:
        """Generated tokens as they come. Closing the iterator early aborts the request.

        Raises `KVLoadFailed` or `EngineDied`; nothing of the request is held afterwards.
        """
        params = seq.params or {}
        try:
            self._renew(seq)
            await self._admit(seq)
            await load(self._cluster, self, seq)
            self._stop_renewing(seq)
            await self._prefill(seq)
            while True:
                self._check_alive()
                token = seq.writer.next(seq.sampling.draw(seq.attention.state), may_end=seq.may_end)
                seq.output.append(token)
                reason = seq.ended_by(token, self.options.context_length)
                if reason is not None:
                    self._finish(seq, reason)
                yield token
                if reason is not None:
                    return
                await asyncio.sleep(self.options.decode_seconds_per_token)
                await self._append(seq)
        except EngineDied as death:
            self._crash(str(death))
            raise
        finally:
            self._stop_renewing(seq)
            if seq.finish_reason is None:
                self._abort(seq, params)

    def _abort(self, seq: Sequenced, params: Json) -> None:
        """Free everything at once. One that was never scheduled frees prefill's blocks, too."""
        seq.finish_reason = "abort"
        self._drop(seq)
        if params.get("do_remote_prefill") and self.crashed is None:
            params["do_remote_prefill"] = False
            self.reject(params)

    def reject(self, params: Json) -> None:
        """Tell the remote side that its blocks are not needed, as for a request never scheduled."""
        if names_remote(params):
            remote = self._cluster.reach(self, params)
            if remote is not None:
                remote.memory.notified(params["remote_request_id"])

    def _check_alive(self) -> None:
        if self.crashed is not None:
            raise EngineDied(self.crashed)

    def _crash(self, why: str) -> None:
        if self.crashed is None:
            self.crashed = why
            self._cluster.report("crash", self.name, why)
            self.memory.wake()

    # --- admission -----------------------------------------------------------------------

    async def _admit(self, seq: Sequenced, *, first: bool = False) -> None:
        self.waiting.insert(0 if first else len(self.waiting), seq)
        try:
            while True:
                self._check_alive()
                self.memory.reap()
                room = len(self.running) < self.options.max_running
                if self.waiting[0] is seq and room and self._allocate(seq):
                    break
                await self.memory.change()
        finally:
            self.waiting.remove(seq)
            self.memory.wake()
        self.running.append(seq)

    def _allocate(self, seq: Sequenced) -> bool:
        span = self.options.span
        hits = self._cache_hits(seq)
        external = external_tokens(seq, len(hits) * span, self.options)
        fresh = blocks_for(seq.length, span) - len(hits)
        windowed = 0
        if self.options.num_groups > 1:
            # What is brought over must fit where its own window lies, not the whole prompt's.
            begin = external or seq.length
            windowed = blocks_for(seq.length, span) - max(0, begin - SLIDING_WINDOW) // span
        if self.memory.pool.free - self.memory.pool.unheld(hits) < fresh + windowed:
            return False
        self.memory.pool.share(hits)
        seq.tables = [[*hits, *self.memory.pool.take(fresh)]]
        if windowed:
            padding = [NULL_BLOCK] * (blocks_for(seq.length, span) - windowed)
            seq.tables.append([*padding, *self.memory.pool.take(windowed)])
        seq.cached_tokens = seq.computed = len(hits) * span
        seq.external_tokens = external
        return True

    def _cache_hits(self, seq: Sequenced) -> list[int]:
        if seq.skip_cache or not self.options.prefix_caching:
            return []
        hits = []
        span = self.options.span
        for digest in seq.digests(span)[: (seq.length - 1) // span]:
            block = self.memory.pool.cached(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    # --- computing -----------------------------------------------------------------------------

    async def _prefill(self, seq: Sequenced) -> None:
        held = seq.computed
        # The last token is always computed: its output is what the next one is drawn from.
        seq.computed = min(seq.computed, seq.length - 1)
        self._check_truth(seq, held)
        await asyncio.sleep(self.options.prefill_seconds_per_token * (seq.length - seq.computed))
        seq.attention = self._attention(seq)
        self.computed_tokens += seq.length - seq.computed
        while seq.computed < seq.length:
            self._compute(seq)
        self._slide(seq)
        self.file(seq)

    def _compute(self, seq: Sequenced) -> None:
        values = seq.attention.values(seq.key(seq.computed))
        for table, value in zip(seq.tables, values, strict=True):
            if table[seq.computed // self.options.span] != NULL_BLOCK:
                self.memory.pool.write(table, seq.computed, value)
        seq.attention.see(values)
        seq.computed += 1

    def _attention(self, seq: Sequenced) -> Attention:
        """What the model sees of the computed positions, as they are held now."""
        attention = Attention(self.options.num_groups, seq.adapter)
        for position in range(seq.computed):
            attention.see([self.memory.pool.read(table, position) for table in seq.tables])
        return attention

    def _check_truth(self, seq: Sequenced, held: int) -> None:
        """Report positions taken as computed that hold something else than a cold prefill would."""
        truth = true_values(seq.keys()[:held], self.options.num_groups, seq.adapter)
        for position, values in enumerate(truth):
            for group, (table, value) in enumerate(zip(seq.tables, values, strict=True)):
                in_window = group == 0 or position >= held - SLIDING_WINDOW
                if in_window and self.memory.pool.read(table, position) != value:
                    origin = "cached" if position < seq.cached_tokens else "pulled"
                    self._cluster.report("wrong-kv", self.name, f"{origin} position {position} of {held}")
                    return

    def file(self, seq: Sequenced) -> None:
        """Put the full computed blocks into the prefix cache, under the hashes of this prompt."""
        if self.options.prefix_caching:
            full = seq.computed // self.options.span
            for block, digest in zip(seq.tables[0][:full], seq.digests(self.options.span)[:full], strict=True):
                self.memory.pool.file(block, digest)

    async def _append(self, seq: Sequenced) -> None:
        """Compute the newest token; without a block for it, give all back and queue again."""
        self._check_alive()
        span = self.options.span
        if seq.computed == len(seq.tables[0]) * span:
            self.memory.reap()
            if self.memory.pool.free < self.options.num_groups:
                self._drop(seq)
                await self._admit(seq, first=True)
                await self._prefill(seq)
                return
            for table in seq.tables:
                table.extend(self.memory.pool.take(1))
        self._compute(seq)
        self._slide(seq)
        if seq.computed % span == 0:
            self.file(seq)

    def _slide(self, seq: Sequenced) -> None:
        """Free the blocks that a sliding window has left behind."""
        gone = max(0, seq.computed - SLIDING_WINDOW) // self.options.span
        for table in seq.tables[1:]:
            self.memory.pool.release(table[:gone])
            table[:gone] = [NULL_BLOCK] * gone

    # --- after the end ----------------------------------------------------------------------------

    def _finish(self, seq: Sequenced, reason: str) -> None:
        seq.finish_reason = reason
        self.running.remove(seq)
        params = seq.params
        prefills = bool(params and params.get("do_remote_decode"))
        if not params or (not prefills and not self.options.bidirectional):
            self.memory.release(seq)
            return
        tables = [table[: blocks_for(seq.computed, self.options.span)] for table in seq.tables]
        spare = [table[len(used) :] for table, used in zip(seq.tables, tables, strict=True)]
        self.memory.pool.release(itertools.chain.from_iterable(spare))
        lasting = self.options.kv_lease_duration if prefills else self.options.decoder_kv_blocks_ttl
        deadline = self.memory.now() + lasting
        kept = Retention(
            request_id=seq.request_id,
            kind="leased" if prefills else "retained",
            blocks=[block for table in tables for block in table if block != NULL_BLOCK],
            num_tokens=seq.computed,
            deadline=deadline if seq.tracked else None,
            lease=self.options.kv_lease_duration,
        )
        self.memory.retain(kept)
        seq.tables = []
        seq.kv_transfer_params = {
            "do_remote_prefill": prefills,
            "do_remote_decode": not prefills,
            "remote_block_ids": unpadded(tables, window_blocks(self.options.span)),
            "remote_engine_id": self.engine_id,
            "remote_request_id": seq.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": self.options.dcp_size,
            "pp_size": 1,
            "remote_num_tokens": seq.computed,
            "remote_blocks_expiry_time": None if prefills else deadline,
            "transfer_mode": "pull",
        }
        if self.options.unknown_members:
            seq.kv_transfer_params["sim_opaque"] = {"of": seq.request_id, "values": [1, None, "x"]}

    def _drop(self, seq: Sequenced) -> None:
        if seq in self.running:
            self.running.remove(seq)
        self.memory.release(seq)

    # --- waiting, and making others wait no longer -----------------------------------------------------

    def _renew(self, seq: Sequenced) -> None:
        params = seq.params or {}
        complete = all(params.get(key) is not None for key in ("remote_engine_id", "remote_host", "tp_size"))
        remote = self._cluster.reach(self, params) if params.get("do_remote_prefill") and complete else None
        if remote is not None:
            kept = remote.memory.retentions.get(params.get("remote_request_id", ""))
            if kept is not None:
                kept.renew(seq.request_id, remote.memory.now())

    def _stop_renewing(self, seq: Sequenced) -> None:
        for core in self._cluster.cores():
            for kept in core.memory.retentions.values():
                kept.stop_renewing(seq.request_id, core.memory.now())

"""The engine behind the API: queue, cache memory, transfers, generation, retention.

Follows vLLM's pull connector: remote positions are taken as computed without a look at the
tokens, a read does not ask whether the blocks are still those that were meant, and a
notification is what frees the remote side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from .model import SLIDING_WINDOW, Attention, true_values
from .options import Options
from .retention import Held, Retention
from .sequence import Sequenced, blocks_for, unpadded
from .storage import NULL_BLOCK, BlockPool
from .transfer import EXPIRY_MARGIN, EngineDied, KVLoadFailed, names_remote, pairs

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
        self.pool = BlockPool(
            options.num_blocks,
            options.span,
            prefix_caching=options.prefix_caching,
            scrub=options.scrub_freed,
        )
        self.retentions: dict[str, Retention] = {}
        self.waiting: list[Sequenced] = []
        self.running: list[Sequenced] = []
        self.crashed: str | None = None
        self.computed_tokens = 0
        self.pulled_tokens = 0
        self._cluster = cluster
        self._skew = random.uniform(-1e6, 1e6)
        self._changed = asyncio.Event()
        self._window_blocks = blocks_for(SLIDING_WINDOW, options.span) + 1
        cluster.clock.on_advance(self._wake)

    def now(self) -> float:
        """The engine's private clock, which no other process can read."""
        return self._cluster.clock.now() + self._skew

    # --- running a request -------------------------------------------------------------

    async def generate(self, seq: Sequenced) -> AsyncGenerator[int, None]:
        """Generated tokens as they come. Closing the iterator early aborts the request.

        Raises `KVLoadFailed` or `EngineDied`; nothing of the request is held afterwards.
        """
        params = seq.params or {}
        try:
            self._renew(seq)
            await self._admit(seq)
            await self._load(seq)
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
                remote.notified(params["remote_request_id"])

    def _check_alive(self) -> None:
        if self.crashed is not None:
            raise EngineDied(self.crashed)

    def _crash(self, why: str) -> None:
        if self.crashed is None:
            self.crashed = why
            self._cluster.report("crash", self.name, why)
            self._wake()

    # --- admission -----------------------------------------------------------------------

    async def _admit(self, seq: Sequenced, *, first: bool = False) -> None:
        self.waiting.insert(0 if first else len(self.waiting), seq)
        try:
            while True:
                self._check_alive()
                self.reap()
                room = len(self.running) < self.options.max_running
                if self.waiting[0] is seq and room and self._allocate(seq):
                    break
                await self._change()
        finally:
            self.waiting.remove(seq)
            self._wake()
        self.running.append(seq)

    def _allocate(self, seq: Sequenced) -> bool:
        span = self.options.span
        hits = self._cache_hits(seq)
        external = self._external_tokens(seq, len(hits) * span)
        fresh = blocks_for(seq.length, span) - len(hits)
        windowed = 0
        if self.options.num_groups > 1:
            # What is brought over must fit where its own window lies, not the whole prompt's.
            begin = external or seq.length
            windowed = blocks_for(seq.length, span) - max(0, begin - SLIDING_WINDOW) // span
        if self.pool.free - self.pool.unheld(hits) < fresh + windowed:
            return False
        self.pool.share(hits)
        seq.tables = [[*hits, *self.pool.take(fresh)]]
        if windowed:
            padding = [NULL_BLOCK] * (blocks_for(seq.length, span) - windowed)
            seq.tables.append([*padding, *self.pool.take(windowed)])
        seq.cached_tokens = seq.computed = len(hits) * span
        seq.external_tokens = external
        return True

    def _cache_hits(self, seq: Sequenced) -> list[int]:
        if seq.skip_cache or not self.options.prefix_caching:
            return []
        hits = []
        span = self.options.span
        for digest in seq.digests(span)[: (seq.length - 1) // span]:
            block = self.pool.cached(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    # --- bringing the cache over -----------------------------------------------------------

    def _external_tokens(self, seq: Sequenced, cached: int) -> int:
        """Positions beyond the local ones that the remote side is said to hold. Not looked at."""
        params = seq.params
        if not params or seq.skip_cache or params.get("_remote_blocks_processed"):
            return 0
        if params.get("do_remote_prefill"):
            return max(0, len(seq.prompt) - cached)
        if params.get("do_remote_decode") and names_remote(params):
            claimed = min(params.get("remote_num_tokens") or 0, len(seq.prompt)) - cached
            return claimed if claimed >= max(1, self.options.kv_recompute_threshold) else 0
        return 0

    async def _load(self, seq: Sequenced) -> None:
        params = seq.params
        if not params:
            return
        bidirectional = self.options.bidirectional
        external = seq.external_tokens
        seq.tracked = bool(params.get("do_remote_decode") or (params.get("do_remote_prefill") and bidirectional))
        processes = params.get("do_remote_prefill") or (
            params.get("do_remote_decode") and bidirectional and not params.get("_remote_blocks_processed")
        )
        if processes and not params.get("remote_block_ids") and external:
            raise EngineDied("blocks were promised and none were named")
        notified = bool(processes) and names_remote(params)
        if external and not notified:
            await asyncio.get_running_loop().create_future()  # parked for blocks that never come
        params["do_remote_prefill"] = False
        params["_remote_blocks_processed"] = True
        if notified:
            await asyncio.sleep(self.options.transfer_seconds if external else 0)
            self._read(seq, params, external)

    def _read(self, seq: Sequenced, params: Json, external: int) -> None:
        remote = self._cluster.reach(self, params)
        request_id: str = params["remote_request_id"]
        if remote is None:
            if external:
                raise KVLoadFailed("handshake or transfer failed")
            return
        if external:
            if self.options.expiry_check and self.options.bidirectional:
                deadline = params.get("remote_blocks_expiry_time")
                if deadline is not None and remote.now() + EXPIRY_MARGIN >= deadline:
                    raise KVLoadFailed("remote blocks are about to expire")
            if self.options.refuses_unknown_reads and request_id not in remote.retentions:
                raise KVLoadFailed("remote request is unknown")
            self._copy(seq, params["remote_block_ids"], remote, request_id, external)
        remote.notified(request_id)

    def _copy(self, seq: Sequenced, blocks: Any, remote: Core, request_id: str, external: int) -> None:
        span, skipped = self.options.span, seq.cached_tokens // self.options.span
        if remote.options.span != span:
            raise KVLoadFailed("block sizes differ")
        filled = blocks_for(seq.cached_tokens + external, span)
        local = unpadded([table[:filled] for table in seq.tables], self._window_blocks)
        local[0] = seq.tables[0][skipped:filled]
        dcp = self.options.dcp_size > 1 or remote.options.dcp_size > 1
        kept = remote.retentions.get(request_id)
        copied = pairs(local, blocks, dcp=dcp, skipped=skipped)
        if not all(remote.pool.exists(there) for _, _, there in copied):
            raise KVLoadFailed("no such remote block")
        for _, here, there in copied:
            if there != NULL_BLOCK and (kept is None or there not in kept.blocks):
                self._cluster.report("stale-read", self.name, f"block {there} of {request_id}")
            if here != NULL_BLOCK:
                self.pool.fill(here, remote.pool.contents(there))
        seq.computed = seq.cached_tokens + external
        self.pulled_tokens += external
        self._file(seq)

    def notified(self, request_id: str) -> None:
        """Someone has read a request's blocks, or does not need them: free them."""
        self.reap()
        kept = self.retentions.get(request_id)
        if kept is None or kept.deadline is None:
            self._cluster.report("late-notification", self.name, request_id)
            return
        self._free(kept)

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
        self._file(seq)

    def _compute(self, seq: Sequenced) -> None:
        values = seq.attention.values(seq.key(seq.computed))
        for table, value in zip(seq.tables, values, strict=True):
            if table[seq.computed // self.options.span] != NULL_BLOCK:
                self.pool.write(table, seq.computed, value)
        seq.attention.see(values)
        seq.computed += 1

    def _attention(self, seq: Sequenced) -> Attention:
        """What the model sees of the computed positions, as they are held now."""
        attention = Attention(self.options.num_groups, seq.adapter)
        for position in range(seq.computed):
            attention.see([self.pool.read(table, position) for table in seq.tables])
        return attention

    def _check_truth(self, seq: Sequenced, held: int) -> None:
        """Report positions taken as computed that hold something else than a cold prefill would."""
        truth = true_values(seq.keys()[:held], self.options.num_groups, seq.adapter)
        for position, values in enumerate(truth):
            for group, (table, value) in enumerate(zip(seq.tables, values, strict=True)):
                in_window = group == 0 or position >= held - SLIDING_WINDOW
                if in_window and self.pool.read(table, position) != value:
                    origin = "cached" if position < seq.cached_tokens else "pulled"
                    self._cluster.report("wrong-kv", self.name, f"{origin} position {position} of {held}")
                    return

    def _file(self, seq: Sequenced) -> None:
        """Put the full computed blocks into the prefix cache, under the hashes of this prompt."""
        if self.options.prefix_caching:
            full = seq.computed // self.options.span
            for block, digest in zip(seq.tables[0][:full], seq.digests(self.options.span)[:full], strict=True):
                self.pool.file(block, digest)

    async def _append(self, seq: Sequenced) -> None:
        """Compute the newest token; without a block for it, give all back and queue again."""
        self._check_alive()
        span = self.options.span
        if seq.computed == len(seq.tables[0]) * span:
            self.reap()
            if self.pool.free < self.options.num_groups:
                self._drop(seq)
                await self._admit(seq, first=True)
                await self._prefill(seq)
                return
            for table in seq.tables:
                table.extend(self.pool.take(1))
        self._compute(seq)
        self._slide(seq)
        if seq.computed % span == 0:
            self._file(seq)

    def _slide(self, seq: Sequenced) -> None:
        """Free the blocks that a sliding window has left behind."""
        gone = max(0, seq.computed - SLIDING_WINDOW) // self.options.span
        for table in seq.tables[1:]:
            self.pool.release(table[:gone])
            table[:gone] = [NULL_BLOCK] * gone

    # --- after the end ----------------------------------------------------------------------------

    def _finish(self, seq: Sequenced, reason: str) -> None:
        seq.finish_reason = reason
        self.running.remove(seq)
        params = seq.params
        prefills = bool(params and params.get("do_remote_decode"))
        if not params or (not prefills and not self.options.bidirectional):
            self._release(seq)
            return
        tables = [table[: blocks_for(seq.computed, self.options.span)] for table in seq.tables]
        spare = [table[len(kept) :] for table, kept in zip(seq.tables, tables, strict=True)]
        self.pool.release(itertools.chain.from_iterable(spare))
        lasting = self.options.kv_lease_duration if prefills else self.options.decoder_kv_blocks_ttl
        deadline = self.now() + lasting
        blocks = [block for table in tables for block in table if block != NULL_BLOCK]
        self.retentions[seq.request_id] = Retention(
            request_id=seq.request_id,
            kind="leased" if prefills else "retained",
            blocks=blocks,
            num_tokens=seq.computed,
            deadline=deadline if seq.tracked else None,
            lease=self.options.kv_lease_duration,
        )
        if not seq.tracked:
            self._cluster.report("never-freed", self.name, seq.request_id)
        seq.tables = []
        seq.kv_transfer_params = {
            "do_remote_prefill": prefills,
            "do_remote_decode": not prefills,
            "remote_block_ids": unpadded(tables, self._window_blocks),
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
        self._wake()

    def _drop(self, seq: Sequenced) -> None:
        if seq in self.running:
            self.running.remove(seq)
        self._release(seq)

    def _release(self, seq: Sequenced) -> None:
        for table in seq.tables:
            self.pool.release(table)
        seq.tables, seq.computed = [], 0
        self._wake()

    def _free(self, kept: Retention) -> None:
        del self.retentions[kept.request_id]
        self.pool.release(kept.blocks)
        self._wake()

    def reap(self) -> None:
        """Free what has expired."""
        now = self.now()
        for kept in [k for k in self.retentions.values() if k.expired(now)]:
            self._free(kept)

    def held(self) -> Held:
        self.reap()
        by_kind: dict[str, dict[str, int]] = {"leased": {}, "retained": {}}
        for kept in self.retentions.values():
            by_kind[kept.kind][kept.request_id] = len(kept.blocks)
        running = {s.request_id: sum(b != NULL_BLOCK for t in s.tables for b in t) for s in self.running}
        return Held(self.pool.capacity - self.pool.free, running, **by_kind)

    # --- waiting, and making others wait no longer -----------------------------------------------------

    def _renew(self, seq: Sequenced) -> None:
        params = seq.params or {}
        complete = all(params.get(key) is not None for key in ("remote_engine_id", "remote_host", "tp_size"))
        remote = self._cluster.reach(self, params) if params.get("do_remote_prefill") and complete else None
        if remote is not None:
            remote.reap()
            kept = remote.retentions.get(params.get("remote_request_id", ""))
            if kept is not None:
                kept.renew(seq.request_id, remote.now())

    def _stop_renewing(self, seq: Sequenced) -> None:
        for core in self._cluster.cores():
            for kept in core.retentions.values():
                kept.stop_renewing(seq.request_id, core.now())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        """Wait until something may have become free."""
        now = self.now()
        deadlines = [k.deadline - now for k in self.retentions.values() if k.deadline is not None and not k.renewers]
        timeout = max(0.0, min(deadlines)) + 0.001 if deadlines else None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

"""Bringing the cache over from another engine, as the pull connector does it.

Nothing here looks at tokens: positions that the parameters claim are taken as computed, and a
read takes whatever lies in the named blocks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .model import SLIDING_WINDOW
from .options import Options
from .sequence import Sequenced, blocks_for, unpadded
from .storage import NULL_BLOCK
from .transfer import EXPIRY_MARGIN, EngineDied, KVLoadFailed, names_remote, pairs

if TYPE_CHECKING:
    from .cluster import Cluster
    from .core import Core

Json = dict[str, Any]


def external_tokens(seq: Sequenced, cached: int, options: Options) -> int:
    """How many positions beyond the local ones the remote side is said to hold."""
    params = seq.params
    if not params or seq.skip_cache or params.get("_remote_blocks_processed"):
        return 0
    if params.get("do_remote_prefill"):
        return max(0, len(seq.prompt) - cached)
    if params.get("do_remote_decode") and names_remote(params):
        claimed = min(params.get("remote_num_tokens") or 0, len(seq.prompt)) - cached
        return claimed if claimed >= max(1, options.kv_recompute_threshold) else 0
    return 0


def window_blocks(span: int) -> int:
    """Blocks of a sliding-window group that are exchanged: those of a window, and one more."""
    return blocks_for(SLIDING_WINDOW, span) + 1


async def load(cluster: Cluster, core: Core, seq: Sequenced) -> None:
    """Read what `seq.external_tokens` counts into its blocks, and tell the remote side.

    The remote side is told even if nothing is read (all of it cached here, or too little to be
    worth a transfer). Raises `KVLoadFailed` if there was something to read and it failed.
    """
    params = seq.params
    if not params:
        return
    options = core.options
    external = seq.external_tokens
    prefills, decodes = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
    seq.tracked = prefills or (decodes and options.bidirectional)
    again = bool(params.get("_remote_blocks_processed"))
    processes = decodes or (prefills and options.bidirectional and not again)
    if processes and external and not params.get("remote_block_ids"):
        raise EngineDied("blocks were promised and none were named")
    tells = processes and names_remote(params)
    if external and not tells:
        await asyncio.get_running_loop().create_future()  # parked for blocks that never come
    params["do_remote_prefill"] = False
    params["_remote_blocks_processed"] = True
    if tells:
        await asyncio.sleep(options.transfer_seconds if external else 0)
        _read(cluster, core, seq, params)


def _read(cluster: Cluster, core: Core, seq: Sequenced, params: Json) -> None:
    remote = cluster.reach(core, params)
    request_id: str = params["remote_request_id"]
    if remote is None:
        if seq.external_tokens:
            raise KVLoadFailed("handshake or transfer failed")
        return
    if seq.external_tokens:
        if core.options.expiry_check and core.options.bidirectional:
            deadline = params.get("remote_blocks_expiry_time")
            if deadline is not None and remote.memory.now() + EXPIRY_MARGIN >= deadline:
                raise KVLoadFailed("remote blocks are about to expire")
        if core.options.refuses_unknown_reads and request_id not in remote.memory.retentions:
            raise KVLoadFailed("remote request is unknown")
        _copy(cluster, core, seq, remote, params)
    remote.memory.notified(request_id)


def _copy(cluster: Cluster, core: Core, seq: Sequenced, remote: Core, params: Json) -> None:
    span = core.options.span
    if remote.options.span != span:
        raise KVLoadFailed("block sizes differ")
    skipped = seq.cached_tokens // span
    total = seq.cached_tokens + seq.external_tokens
    filled = blocks_for(total, span)
    local = unpadded([table[:filled] for table in seq.tables], window_blocks(span))
    local[0] = local[0][skipped:]
    dcp = core.options.dcp_size > 1 or remote.options.dcp_size > 1
    copied = pairs(local, params["remote_block_ids"], dcp=dcp, skipped=skipped)
    if not all(remote.memory.pool.exists(there) for _, _, there in copied):
        raise KVLoadFailed("no such remote block")
    request_id: str = params["remote_request_id"]
    kept = remote.memory.retentions.get(request_id)
    for _, here, there in copied:
        if there != NULL_BLOCK and (kept is None or there not in kept.blocks):
            cluster.report("stale-read", core.name, f"block {there} of {request_id}")
        if here != NULL_BLOCK:
            core.memory.pool.fill(here, remote.memory.pool.contents(there))
    seq.computed = total
    core.pulled_tokens += seq.external_tokens
    core.file(seq)

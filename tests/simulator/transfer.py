"""Which remote block is copied into which local one: the engines' rule, mistakes included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Without these the engine does not try to reach the remote side."""

EXPIRY_MARGIN = 5.0
"""Seconds before the remote deadline from which on a read is declined."""


class KVLoadFailed(Exception):
    """The cache could not be brought over; the request fails as a whole (policy `fail`)."""


class EngineDied(Exception):
    """An assertion inside the engine: the process goes down and takes every request along."""


def pairs(
    local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]], *, dcp: bool, skipped: int
) -> list[tuple[int, int, int]]:
    """`(group, local block, remote block)` to copy.

    Lists of unequal length are aligned at their *tails*, as a shorter local list is taken for
    one whose beginning was in the local prefix cache. A longer local list is an assertion
    failure. With decode context parallelism they are aligned at their heads, behind the
    `skipped` blocks that are cached locally.
    """
    well_formed = isinstance(remote, list) and all(isinstance(group, list) for group in remote)
    if not well_formed or len(local) != len(remote):
        raise EngineDied(f"{len(local)} cache groups here, {remote!r} from the remote side")
    found: list[tuple[int, int, int]] = []
    for group, (mine, theirs) in enumerate(zip(local, remote, strict=True)):
        if dcp:
            matched = list(zip(mine, theirs[skipped:], strict=False))
        elif len(mine) > len(theirs):
            raise EngineDied(f"group {group}: {len(mine)} blocks to fill from {len(theirs)}")
        else:
            matched = list(zip(mine, theirs[len(theirs) - len(mine) :], strict=True))
        found.extend((group, here, there) for here, there in matched)
    return found


def names_remote(params: Json) -> bool:
    """Whether the parameters say where remote blocks are. `[[]]` does, `[]` does not."""
    return bool(params.get("remote_block_ids")) and all(key in params for key in REQUIRED)

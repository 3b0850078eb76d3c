"""Numbered blocks of cache memory: who holds them, what lies in them, which are cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""The block that stands for "no block"; it is never handed out."""


class BlockPool:
    """The memory of one engine process.

    Free blocks keep what lay in them until they are handed out again, unless `scrub` is on:
    then a block that no one holds and that is not in the prefix cache is filled with rubbish at
    once, which is what a reader of freed memory must expect at the latest.
    """

    def __init__(self, blocks: int, span: int, *, prefix_caching: bool, scrub: bool) -> None:
        self.span = span
        self.capacity = blocks - 1
        self._caching = prefix_caching
        self._scrub = scrub
        self._rubbish = 1 << 62
        self._data = [self._filled() for _ in range(blocks)]
        self._holders = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._hash_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.capacity

    def exists(self, block: object) -> bool:
        return isinstance(block, int) and 0 <= block < len(self._data)

    def read(self, table: Sequence[int], position: int) -> int:
        return self._data[table[position // self.span]][position % self.span]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        self._data[table[position // self.span]][position % self.span] = value

    def contents(self, block: int) -> list[int]:
        return list(self._data[block])

    def fill(self, block: int, values: Sequence[int]) -> None:
        self._data[block] = list(values)

    def take(self, count: int) -> list[int]:
        """Hand out blocks; what they cached is forgotten, what lies in them stays."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
            self._forget(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Uncached ones are the first to be handed out again."""
        for block in reversed(list(blocks)):
            if block == NULL_BLOCK:
                continue
            self._holders[block] -= 1
            if self._holders[block] < 0:
                raise AssertionError(f"block {block} was released twice")
            if self._holders[block]:
                continue
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)
                if self._scrub:
                    self._data[block] = self._filled()

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are among the free ones."""
        return sum(1 for block in blocks if block in self._free)

    def cached(self, digest: int) -> int | None:
        """The block filed under a hash, if any."""
        return self._block_of.get(digest)

    def file(self, block: int, digest: int) -> None:
        """Put a block into the prefix cache under a hash of tokens, whatever lies in it."""
        if self._caching and block not in self._hash_of and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def _filled(self) -> list[int]:
        self._rubbish += self.span
        return list(range(self._rubbish - self.span, self._rubbish))

"""Blocks of K/V by id: who holds them, and the order in which unheld ones are given up."""

from array import array

import numpy as np

from radixserve.core.eviction.order import EvictionOrder
from radixserve.core.packed import indices_of, view_of
from radixserve.core.unheld_blocks import UnheldBlocks


class BlockPool:
    """Count the holders of each block, and keep the blocks that nobody holds.

    A block is free, cached (the radix tree alone knows it) or in use. A sequence that holds a block counts in its
    refcount; the source of a copy is held apart from that, so that a refcount of 1 always means one writer. A pin on a
    block makes none of that different, but eviction cannot take it.
    """

    def __init__(self, num_blocks: int, order: EvictionOrder) -> None:
        self.num_blocks = num_blocks
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._refcounts = array("i", bytes(4 * num_blocks))
        self._num_copies_from: dict[int, int] = {}
        # Tables are dropped deepest first, and whoever holds a block holds all blocks above it; so a block enters after
        # every block below it.
        self._cached = UnheldBlocks(num_blocks, order)

    @property
    def num_free(self) -> int:
        """Blocks with no content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the radix tree knows."""
        return len(self._cached)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that eviction may take: those without a pin."""
        return self._cached.num_evictable

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin, cached or in use."""
        return self._cached.num_pinned

    @property
    def num_in_use(self) -> int:
        """Blocks held by a sequence or as the source of a copy."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def refcount(self, block_id: int) -> int:
        """How many sequences hold the block."""
        return self._refcounts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether nobody holds the block, and it can still be found."""
        return block_id in self._cached

    def is_evictable(self, block_id: int) -> bool:
        """Whether nobody holds the block, no pin is on it, and it can still be found."""
        return self._cached.is_evictable(block_id)

    def count_evictable(self, block_ids: "array[int]") -> int:
        """How many of the blocks eviction may take."""
        return self._cached.count_evictable(block_ids)

    def num_pins(self, block_id: int) -> int:
        """How many pins are on the block."""
        return self._cached.num_pins(block_id)

    def pin(self, block_ids: "array[int]") -> None:
        """Put one more pin on blocks, all different, each cached or in use."""
        self._cached.pin(block_ids)

    def unpin(self, block_ids: "array[int]") -> "array[int]":
        """Take one pin off blocks, all different, each after those that follow it; return those with none left."""
        return self._cached.unpin(block_ids)

    def take(self) -> int:
        """Give out a free block to one sequence. There must be a free one."""
        block_id = self._free.pop()
        self._refcounts[block_id] = 1
        return block_id

    def share(self, block_ids: "array[int]") -> None:
        """Count one more sequence that holds the blocks, all different, each cached or in use."""
        self._cached.discard_all(block_ids)
        view_of(self._refcounts)[indices_of(block_ids)] += 1

    def drop(self, block_id: int, *, is_findable: bool) -> None:
        """Count one sequence less. A block that nobody holds is cached if the tree can find it, else free."""
        self._refcounts[block_id] -= 1
        self._settle(block_id, is_findable)

    def drop_findable(self, block_ids: "array[int]") -> None:
        """Count one sequence less that holds the blocks, all different, which the tree can find; in this order."""
        ids, refcounts = indices_of(block_ids), view_of(self._refcounts)
        refcounts[ids] -= 1
        is_unheld = refcounts[ids] == 0
        if self._num_copies_from:
            is_unheld &= ~np.isin(ids, list(self._num_copies_from))
        self._cached.add_all(array("i", view_of(block_ids)[is_unheld].tobytes()))

    def hold_source(self, block_id: int) -> None:
        """Keep the source of a copy, cached or in use, from being evicted."""
        self._cached.discard(block_id)
        self._num_copies_from[block_id] = self._num_copies_from.get(block_id, 0) + 1

    def drop_source(self, block_id: int, *, is_findable: bool) -> None:
        """End one hold_source; is_findable as in drop."""
        self._num_copies_from[block_id] -= 1
        if not self._num_copies_from[block_id]:
            del self._num_copies_from[block_id]
        self._settle(block_id, is_findable)

    def free(self, block_ids: "array[int]") -> None:
        """Free cached blocks that the tree no longer finds."""
        self._cached.discard_all(block_ids)
        self._free += block_ids

    def _settle(self, block_id: int, is_findable: bool) -> None:
        if self._refcounts[block_id] or block_id in self._num_copies_from:
            return
        if is_findable:
            self._cached.add(block_id)
        else:
            self._free.append(block_id)

"""Blocks of K/V by id: who holds them, and the order in which unheld ones are given up."""

from array import array
from collections import OrderedDict


class BlockPool:
    """Count the holders of each block, and keep the blocks that nobody holds.

    A block is free, cached (the radix tree alone knows it) or in use. A sequence that holds a block counts in its
    refcount; the source of a copy is held apart from that, so that a refcount of 1 always means one writer.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refcounts = array("i", bytes(4 * num_blocks))
        self._num_copies_from: dict[int, int] = {}
        # Insertion order is the order of eviction. Tables are dropped deepest first, and whoever holds a block holds
        # all blocks above it; so a block enters after every block below it, and the front is always a leaf's end.
        # An OrderedDict finds its front at once; a dict looks past all that was ever deleted there.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks with no content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the radix tree knows, which eviction may take."""
        return len(self._cached)

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

    def cached_ids(self) -> list[int]:
        """The blocks that eviction may take, in the order in which it would."""
        return list(self._cached)

    def oldest_cached(self) -> int:
        """The block that eviction takes next. There must be a cached one."""
        return next(iter(self._cached))

    def take(self) -> int:
        """Give out a free block to one sequence. There must be a free one."""
        block_id = self._free.pop()
        self._refcounts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Count one more sequence that holds the block, which is cached or in use."""
        self._cached.pop(block_id, None)
        self._refcounts[block_id] += 1

    def drop(self, block_id: int, *, is_findable: bool) -> None:
        """Count one sequence less. A block that nobody holds is cached if the tree can find it, else free."""
        self._refcounts[block_id] -= 1
        self._settle(block_id, is_findable)

    def hold_source(self, block_id: int) -> None:
        """Keep the source of a copy, cached or in use, from being evicted."""
        self._cached.pop(block_id, None)
        self._num_copies_from[block_id] = self._num_copies_from.get(block_id, 0) + 1

    def drop_source(self, block_id: int, *, is_findable: bool) -> None:
        """End one hold_source; is_findable as in drop."""
        self._num_copies_from[block_id] -= 1
        if not self._num_copies_from[block_id]:
            del self._num_copies_from[block_id]
        self._settle(block_id, is_findable)

    def free(self, block_id: int) -> None:
        """Free a cached block that the tree no longer finds."""
        del self._cached[block_id]
        self._free.append(block_id)

    def _settle(self, block_id: int, is_findable: bool) -> None:
        if self._refcounts[block_id] or block_id in self._num_copies_from:
            return
        if is_findable:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

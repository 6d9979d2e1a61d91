"""Blocks that leave the pool, on their way to a store."""

from array import array

import numpy as np

from radixserve.core.block_store import BlockBytes, BlockStore
from radixserve.core.cache_observer import CacheObserver, RemovalReason
from radixserve.core.radix_tree import Removal
from radixserve.core.tiers.block_names import BlockNames, PackedNames, split_names


class Spills(CacheObserver):
    """Collects blocks to be copied out of the pool in the next step, and hands what was copied to the store.

    To be added to the cache before names, which forgets the blocks that are removed.
    num_dropped: blocks that were evicted and had no room in the queue of the store.
    """

    def __init__(self, store: BlockStore, names: BlockNames) -> None:
        self._store = store
        self._names = names
        self._block_ids = array("i")
        self._block_names: list[bytes] = []
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._block_ids)

    def remove(self, removal: Removal, reason: RemovalReason) -> None:
        """Keep what is evicted. What its owner drops, and tails, go nowhere."""
        if reason is RemovalReason.EVICTED:
            self.num_dropped += self.add(removal.block_ids, self._names.of(removal.block_ids), deepest_first=True)

    def add(self, block_ids: "array[int]", names: PackedNames, *, deepest_first: bool = False) -> int:
        """Add those blocks that have a name and are not in the store, as far as it has room; return how many it lacks.

        block_ids: of a path. The first ones have room before those behind, which are found only through them.
        deepest_first: they are written the other way round, as a store gives up first what came first.
        A block is added once a step: by its eviction, or while it is in the tree at the end of schedule().
        """
        wanted = [
            (block_id, name)
            for block_id, name in zip(block_ids, split_names(names), strict=True)
            if any(name) and not self._store.contains(name)
        ]
        num_taken = len(wanted)
        while num_taken and not self._store.has_room(len(self._block_ids) + num_taken):
            num_taken //= 2
        taken = wanted[:num_taken][:: -1 if deepest_first else 1]
        self._block_ids.extend(block_id for block_id, _ in taken)
        self._block_names += [name for _, name in taken]
        return len(wanted) - num_taken

    def block_ids(self) -> "array[int]":
        """Return the blocks that the step copies out."""
        return self._block_ids[:]

    def finish(self, blocks: BlockBytes | None) -> None:
        """Give the store what the step copied out; None: the step failed, and they are lost."""
        if blocks is not None and self._block_names:
            self._store.write(self._block_names, np.ascontiguousarray(blocks))
        self._block_ids, self._block_names = array("i"), []

"""Writing all that is cached to a store, a part in each step."""

from array import array

from radixserve.core.block_store import BlockStore
from radixserve.core.kv_cache import KVCache
from radixserve.core.tiers.block_names import BlockNames, PackedNames
from radixserve.core.tiers.spilling import Spills
from radixserve.protocol import SaveProgress


class Save:
    """One save of the blocks that are cached when it begins, parents before children.

    So what was written before a sudden end is the beginnings of prompts, which are found again. A block that is evicted
    meanwhile is written by that.
    """

    def __init__(self, cache: KVCache, store: BlockStore, names: BlockNames, spills: Spills) -> None:
        self._store = store
        self._names = names
        self._spills = spills
        self._parts = _cached_parts(cache, names)
        # More would push out what was written first: of several stores, all of which get it, from the largest.
        self._num_room = max(tier.capacity_bytes for tier in store.stats_of_stores()) // store.block_bytes
        self._num_saved = 0
        self._is_given_up = False

    @property
    def is_collected(self) -> bool:
        """Whether all blocks were looked at, or no more will be."""
        return self._is_given_up or not self._parts

    def collect(self, max_blocks: int) -> bool:
        """Add up to max_blocks blocks to the spills of a step that is scheduled, as far as the store has room.

        Returns whether it has come further.
        """
        if not self._store.stats().is_on:
            self._is_given_up = True
            return False
        num_left = self._num_left()
        while self._parts and max_blocks > 0 and self._num_room > 0:
            block_ids, names = self._parts[-1]
            part = block_ids[: min(max_blocks, self._num_room)]
            # A block has another name now, or none, if it was evicted since.
            wanted = self._names.of(part)
            wanted[(wanted != names[: len(part)]).any(axis=1)] = 0
            num_before = len(self._spills)
            num_lacking = self._spills.add(part, wanted)
            num_added = len(self._spills) - num_before
            self._num_saved += num_added
            self._num_room -= num_added
            if num_lacking:
                return num_added > 0
            max_blocks -= len(part)
            self._parts[-1] = block_ids[len(part) :], names[len(part) :]
            if not self._parts[-1][0]:
                self._parts.pop()
        if self._num_room <= 0:
            self._parts.clear()
        return self._num_left() < num_left

    def progress(self) -> SaveProgress:
        """Return how far it is; the blocks in the queue of the store are left to write."""
        if not self._store.stats().is_on:
            return SaveProgress(True, 0, self._num_left(), "the tier is off: it could not be written to; see the log")
        num_queued = self._store.num_pending_writes + len(self._spills)
        return SaveProgress(
            is_done=self.is_collected and not num_queued,
            num_saved_blocks=max(self._num_saved - num_queued, 0),
            num_left_blocks=self._num_left() + num_queued,
        )

    def _num_left(self) -> int:
        return sum(len(block_ids) for block_ids, _ in self._parts)


def _cached_parts(cache: KVCache, names: BlockNames) -> "list[tuple[array[int], PackedNames]]":
    """Return the full blocks of the tree with their names, the first ones last."""
    parts = []
    for run in cache.walk():
        run_names = names.of(run.block_ids)
        if run_names.any():  # not a tail
            parts.append((run.block_ids[:], run_names))
    return parts[::-1]

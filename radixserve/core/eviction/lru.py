"""The cached blocks that nobody holds, in the order in which they came to be so."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from radixserve.core.eviction.order import EvictionOrder
from radixserve.core.packed import indices_of, view_of

# Below this length dead entries are not worth a sweep.
MIN_SWEPT_ENTRIES = 64
# Blocks compared to see how many go together: enough to cost little for each, few enough where it is one after all.
MAX_RUN = 256


class LeastRecentlyUsed(EvictionOrder):
    """A queue of block ids below num_blocks, from which any of them can leave.

    last_blocks: the last blocks, so many at most, of the run of the tree that a block is in.

    One that leaves stays behind as a dead entry, so that a path of thousands of blocks comes and goes in a few array
    operations. Dead entries are swept out once they are more than half, which makes all of it constant per block.
    """

    def __init__(self, num_blocks: int, last_blocks: Callable[[int, int], "array[int]"]) -> None:
        self._last_blocks = last_blocks
        self._entries = array("i")
        # Entries before it are dead.
        self._first = 0
        # Where the live entry of a block is, or -1.
        self._entry_of = array("i", [-1]) * num_blocks
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block_id: int) -> bool:
        return self._entry_of[block_id] >= 0

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks, the one that has been here for longest first."""
        return (block_id for index, block_id in enumerate(self._entries) if self._entry_of[block_id] == index)

    def count(self, block_ids: "array[int]") -> int:
        """Return how many of the blocks are here."""
        return int(np.count_nonzero(view_of(self._entry_of)[indices_of(block_ids)] >= 0))

    def first(self, max_blocks: int) -> tuple[int, int]:
        """Return the block that has been here for longest, and how many above it are the next ones. There must be one.

        A path comes deepest first, so what one sequence gave back goes run by run.
        """
        while self._entry_of[self._entries[self._first]] != self._first:
            self._first += 1
        block_id = self._entries[self._first]
        if max_blocks == 1:
            return block_id, 1
        run = view_of(self._last_blocks(block_id, min(max_blocks, MAX_RUN)))[::-1]
        next_ones = view_of(self._entries)[self._first : self._first + len(run)]
        run = run[: len(next_ones)]
        # A dead entry may name a block that has come again since.
        is_next = (next_ones == run) & (view_of(self._entry_of)[run] == np.arange(self._first, self._first + len(run)))
        return block_id, len(run) if is_next.all() else int(is_next.argmin())

    def add(self, block_id: int) -> None:
        """Let a block come, which is not here."""
        self._entry_of[block_id] = len(self._entries)
        self._entries.append(block_id)
        self._num_blocks += 1
        self._sweep()

    def add_all(self, block_ids: "array[int]") -> None:
        """Let blocks come, none of which is here, one after the other."""
        start = len(self._entries)
        self._entries += block_ids
        view_of(self._entry_of)[indices_of(block_ids)] = np.arange(start, len(self._entries), dtype=np.int32)
        self._num_blocks += len(block_ids)
        self._sweep()

    def discard(self, block_id: int) -> None:
        """Let a block go, if it is here."""
        if self._entry_of[block_id] >= 0:
            self._entry_of[block_id] = -1
            self._num_blocks -= 1
            self._clear_if_empty()

    def discard_all(self, block_ids: "array[int]") -> None:
        """Let those blocks go that are here. None may be named twice."""
        if len(block_ids) == 1:
            self.discard(block_ids[0])
            return
        ids, entry_of = indices_of(block_ids), view_of(self._entry_of)
        self._num_blocks -= int(np.count_nonzero(entry_of[ids] >= 0))
        entry_of[ids] = -1
        self._clear_if_empty()

    def _clear_if_empty(self) -> None:
        if not self._num_blocks:
            self._entries = array("i")
            self._first = 0

    def _sweep(self) -> None:
        if len(self._entries) <= 2 * self._num_blocks + MIN_SWEPT_ENTRIES:
            return
        entries = view_of(self._entries)
        is_live: npt.NDArray[Any] = view_of(self._entry_of)[entries] == np.arange(len(entries), dtype=np.int32)
        live = entries[is_live]
        view_of(self._entry_of)[live] = np.arange(len(live), dtype=np.int32)
        self._entries = array("i", live.tobytes())
        self._first = 0

"""When each cached block was last used, and how often it was found."""

import time
from array import array
from collections.abc import Callable

import numpy as np

from radixserve.core.cache_observer import CacheObserver
from radixserve.core.packed import indices_of, view_of
from radixserve.core.sequence import Sequence


class BlockUse(CacheObserver):
    """The uses of blocks below num_blocks. What it says of a block that is not in the tree means nothing.

    clock: seconds, from any beginning on.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_used = array("d", bytes(8 * num_blocks))
        self._num_hits = array("i", bytes(4 * num_blocks))

    def now(self) -> float:
        """Return the time on the clock."""
        return self._clock()

    def last_used(self, block_id: int) -> float:
        """When a sequence last held the block, on the clock; for one that is held, when that began at the latest."""
        return self._last_used[block_id]

    def seconds_idle(self, block_id: int) -> float:
        """How long ago last_used was."""
        return self._clock() - self._last_used[block_id]

    def num_hits(self, block_id: int) -> int:
        """How many sequences began with the block since it is cached."""
        return self._num_hits[block_id]

    def begin(self, sequence: Sequence, block_ids: "array[int]") -> None:
        view_of(self._num_hits)[indices_of(block_ids)] += 1
        self._touch(block_ids)

    def reuse(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        self._touch(block_ids)

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        view_of(self._num_hits)[indices_of(block_ids)] = 0
        self._touch(block_ids)

    def enter_tail(self, sequence: Sequence, block_id: int) -> None:
        self.enter(sequence, 0, array("i", [block_id]))

    def release(self, sequence: Sequence) -> None:
        self._touch(sequence.block_table)

    def _touch(self, block_ids: "array[int]") -> None:
        np.frombuffer(self._last_used, np.float64)[indices_of(block_ids)] = self._clock()

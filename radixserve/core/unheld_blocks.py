"""The cached blocks that nobody holds: those in the order of eviction, and pinned ones apart from it."""

from array import array

import numpy as np
import numpy.typing as npt

from radixserve.core.eviction.order import EvictionOrder
from radixserve.core.packed import indices_of, view_of


class UnheldBlocks:
    """Blocks below num_blocks that come once nobody holds them, and go as EvictionOrder says.

    While pins are on a block, it is kept here and not in the order. Who pins a block pins all above it too, as who
    holds one does; so along a path the kept ones come before those in the order.
    num_kept: pinned blocks that are here. num_pinned: all pinned ones, held or not.
    """

    def __init__(self, num_blocks: int, order: EvictionOrder) -> None:
        self._order = order
        self._num_pins = array("i", bytes(4 * num_blocks))
        self._is_kept = bytearray(num_blocks)
        self.num_kept = 0
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self._order) + self.num_kept

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._order or bool(self._is_kept[block_id])

    @property
    def num_evictable(self) -> int:
        """How many are in the order of eviction."""
        return len(self._order)

    def is_evictable(self, block_id: int) -> bool:
        """Whether a block is in the order of eviction."""
        return block_id in self._order

    def count_evictable(self, block_ids: "array[int]") -> int:
        """How many of the blocks are in the order of eviction."""
        return self._order.count(block_ids)

    def num_pins(self, block_id: int) -> int:
        """How many pins are on a block."""
        return self._num_pins[block_id]

    def pin(self, block_ids: "array[int]") -> None:
        """Put one more pin on blocks, all different, that are held or here."""
        ids, num_pins = indices_of(block_ids), view_of(self._num_pins)
        self.num_pinned += int(np.count_nonzero(num_pins[ids] == 0))
        num_pins[ids] += 1
        evictable = array("i", (block_id for block_id in block_ids if block_id in self._order))
        self._order.discard_all(evictable)
        self._keep(evictable, True)

    def unpin(self, block_ids: "array[int]") -> "array[int]":
        """Take one pin off blocks, all different, each after those that follow it; return those that have none left.

        Those of them that are here are in the order of eviction from now on, as ones that have just come.
        """
        ids, num_pins = indices_of(block_ids), view_of(self._num_pins)
        num_pins[ids] -= 1
        is_free = num_pins[ids] == 0
        unpinned = array("i", view_of(block_ids)[is_free].tobytes())
        self.num_pinned -= len(unpinned)
        is_kept = self._kept_view()[indices_of(unpinned)] == 1
        come = array("i", view_of(unpinned)[is_kept].tobytes())
        self._keep(come, False)
        self._order.add_all(come)
        return unpinned

    def add(self, block_id: int) -> None:
        """Let a block come, which is not here."""
        if self._num_pins[block_id]:
            self._keep(array("i", [block_id]), True)
        else:
            self._order.add(block_id)

    def add_all(self, block_ids: "array[int]") -> None:
        """Let blocks come, none of which is here, each after those that follow it in the tree."""
        if self.num_pinned:
            is_pinned = view_of(self._num_pins)[indices_of(block_ids)] > 0
            self._keep(array("i", view_of(block_ids)[is_pinned].tobytes()), True)
            block_ids = array("i", view_of(block_ids)[~is_pinned].tobytes())
        self._order.add_all(block_ids)

    def discard(self, block_id: int) -> None:
        """Let a block go, if it is here."""
        if self._is_kept[block_id]:
            self._keep(array("i", [block_id]), False)
        else:
            self._order.discard(block_id)

    def discard_all(self, block_ids: "array[int]") -> None:
        """Let those blocks go that are here. None may be named twice."""
        if self.num_kept:
            is_kept = self._kept_view()[indices_of(block_ids)] == 1
            self._keep(array("i", view_of(block_ids)[is_kept].tobytes()), False)
        self._order.discard_all(block_ids)

    def _keep(self, block_ids: "array[int]", is_kept: bool) -> None:
        """Let blocks that are not kept be so, or the other way round."""
        self._kept_view()[indices_of(block_ids)] = is_kept
        self.num_kept += len(block_ids) if is_kept else -len(block_ids)

    def _kept_view(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._is_kept, np.uint8)

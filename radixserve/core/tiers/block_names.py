"""The names of the cached blocks, by their ids."""

from array import array

import numpy as np
import numpy.typing as npt

from radixserve.core.block_keys import BlockKeys
from radixserve.core.block_store import NAME_BYTES
from radixserve.core.cache_observer import CacheObserver, RemovalReason
from radixserve.core.packed import indices_of
from radixserve.core.radix_tree import Removal
from radixserve.core.sequence import Sequence

# [n, NAME_BYTES]; zeros for a block that has no name.
PackedNames = npt.NDArray[np.uint8]


class BlockNames(CacheObserver):
    """Keeps the name of each full block in the tree. Its K/V do not change while it has one.

    num_blocks: ids are below it. keys: makes the names.
    """

    def __init__(self, num_blocks: int, keys: BlockKeys) -> None:
        self._keys = keys
        self._names: PackedNames = np.zeros((num_blocks, NAME_BYTES), np.uint8)

    def of(self, block_ids: "array[int]") -> PackedNames:
        """Return a copy of the names of blocks."""
        return self._names[indices_of(block_ids)]

    def tell(self, sequence: Sequence, block_ids: "array[int]") -> None:
        """Let a sequence know the names of the cached blocks that it begins with, which are not hashed again."""
        num_known = len(sequence.names)
        if num_known < len(block_ids):
            sequence.names += split_names(self.of(block_ids[num_known:]))

    def begin(self, sequence: Sequence, block_ids: "array[int]") -> None:
        self.tell(sequence, block_ids)

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        names = b"".join(self._keys.name_of(sequence, index + offset) for offset in range(len(block_ids)))
        self._names[indices_of(block_ids)] = np.frombuffer(names, np.uint8).reshape(-1, NAME_BYTES)

    def remove(self, removal: Removal, reason: RemovalReason) -> None:
        self._names[indices_of(removal.block_ids)] = 0


def split_names(names: PackedNames) -> list[bytes]:
    """Return names one by one."""
    packed = names.tobytes()
    return [packed[start : start + NAME_BYTES] for start in range(0, len(packed), NAME_BYTES)]

"""What the cache tells those who follow it."""

from array import array
from enum import Enum, auto

from radixserve.core.radix_tree import Removal
from radixserve.core.sequence import Sequence


class RemovalReason(Enum):
    """Why the tree has forgotten blocks.

    EVICTED: another sequence needed the room. RESET: their owner or the operator wished so. COVERED: a tail whose
    tokens another entry holds now, or that a sequence goes on from.
    """

    EVICTED = auto()
    RESET = auto()
    COVERED = auto()


class CacheObserver:
    """Follows what becomes of the cache's blocks; told in the order in which it happens, and changes nothing itself.

    Who derives from it overrides what makes a difference to it.
    index: number of the sequence's block that block_ids begin with.
    """

    def begin(self, sequence: Sequence, block_ids: "array[int]") -> None:
        """Let a sequence begin, or go on after a preemption, with cached blocks that it does not hold yet."""

    def reuse(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        """Let a sequence go on with cached blocks that it does not hold yet."""

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        """Let a sequence's blocks be cached."""

    def enter_tail(self, sequence: Sequence, block_id: int) -> None:
        """Let a sequence's part-filled block be cached."""

    def release(self, sequence: Sequence) -> None:
        """Let a sequence give back all blocks that it holds."""

    def remove(self, removal: Removal, reason: RemovalReason) -> None:
        """Take in what the tree has forgotten. The blocks still hold their K/V."""

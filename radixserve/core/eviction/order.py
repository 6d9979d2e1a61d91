"""The seam between the cache and a policy of eviction."""

from abc import ABC, abstractmethod
from array import array

from radixserve.core.cache_observer import CacheObserver
from radixserve.core.eviction.answer import Answer
from radixserve.core.sequence import Sequence


class EvictionOrder(CacheObserver, ABC):
    """The cached blocks that nobody holds, and which of them goes first.

    The pool says who comes and goes, the cache what is used and removed. A *use* is one request on its path.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block_id: int) -> bool: ...

    @abstractmethod
    def count(self, block_ids: "array[int]") -> int:
        """Return how many of the blocks are here."""

    @abstractmethod
    def add(self, block_id: int) -> None:
        """Let a block come, which is not here."""

    @abstractmethod
    def add_all(self, block_ids: "array[int]") -> None:
        """Let blocks come, none of which is here, each after those that follow it in the tree."""

    @abstractmethod
    def discard(self, block_id: int) -> None:
        """Let a block go, if it is here."""

    @abstractmethod
    def discard_all(self, block_ids: "array[int]") -> None:
        """Let those blocks go that are here. None may be named twice."""

    @abstractmethod
    def first(self, max_blocks: int) -> tuple[int, int]:
        """Return the block to be given up next, the end of a leaf, and how many up from it in its run go together.

        They are max_blocks at most, and all here. There must be a block.
        """

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child go on from where its parent is."""

    def record_answer(self, sequence: Sequence, answer: Answer) -> None:
        """Take in how the answer of a sequence ended."""

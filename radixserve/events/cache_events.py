"""What becomes of full blocks, as events."""

from array import array

from radixserve.core.block_keys import BlockKeys
from radixserve.core.block_store import OWNER_BYTES
from radixserve.core.cache_observer import CacheObserver, RemovalReason
from radixserve.core.radix_tree import Removal
from radixserve.core.sequence import Sequence
from radixserve.core.tiers.block_names import BlockNames, split_names
from radixserve.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event


class CacheEvents(CacheObserver):
    """Turns what a cache of num_blocks blocks tells into events. Tails are left out: no other prompt begins with one.

    Blocks go by the names that keys gives them, without the owners' marks: they tell nothing of tokens, tenant or salt
    to who does not know them.
    with_token_ids: whether the ids of stored blocks are told all the same. medium: where the blocks are.
    The first event clears what consumers may know of an earlier engine.
    """

    def __init__(
        self, keys: BlockKeys, num_blocks: int, block_size: int, *, medium: str, with_token_ids: bool = False
    ) -> None:
        self._keys = keys
        self._block_size = block_size
        self._medium = medium
        self._with_token_ids = with_token_ids
        self._names = BlockNames(num_blocks, keys)
        self._num_stored = 0
        self._was_reset = False
        self._events: list[Event] = [AllBlocksCleared()]

    def take(self) -> list[Event]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        # A reset that leaves nothing need not name every block.
        if self._was_reset and not self._num_stored:
            events = [AllBlocksCleared()]
        self._was_reset = False
        return events

    def begin(self, sequence: Sequence, block_ids: "array[int]") -> None:
        self._names.begin(sequence, block_ids)

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        self._names.enter(sequence, index, block_ids)
        end = index + len(block_ids)
        names = [self._hash_of(sequence, block) for block in range(index, end)]
        token_ids: list[int] = []
        if self._with_token_ids:
            token_ids = sequence.token_ids[index * self._block_size : end * self._block_size].tolist()
        parent = self._hash_of(sequence, index - 1) if index else None
        self._events.append(BlockStored(names, parent, token_ids, self._block_size, None, self._medium))
        self._num_stored += len(names)

    def remove(self, removal: Removal, reason: RemovalReason) -> None:
        block_ids = removal.block_ids
        if len(removal.token_ids) < len(block_ids) * self._block_size:
            return  # a tail
        names = [name[OWNER_BYTES:] for name in reversed(split_names(self._names.of(block_ids)))]
        self._names.remove(removal, reason)
        self._events.append(BlockRemoved(names, self._medium))
        self._num_stored -= len(names)
        self._was_reset = self._was_reset or reason is RemovalReason.RESET

    def _hash_of(self, sequence: Sequence, index: int) -> bytes:
        return self._keys.name_of(sequence, index)[OWNER_BYTES:]

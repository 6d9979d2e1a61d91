"""A BlockStore in memory whose device is under the test's control."""

from collections.abc import Sequence

import numpy as np

from radixserve.core.block_store import BlockBytes, BlockStore, ReadDone, check_blocks
from radixserve.protocol import TierStats


class FakeStore(BlockStore):
    """Holds all blocks written, at once. is_stuck: reads are not completed. max_queued: writes it takes in one call.

    lost: names that contains knows and reads do not find. num_read: blocks that were asked for.
    """

    def __init__(self, block_bytes: int, *, seconds_per_block: float | None = None, capacity: int = 1 << 20) -> None:
        self.blocks: dict[bytes, BlockBytes] = {}
        self.lost: set[bytes] = set()
        self.is_stuck = False
        self.is_on = True
        self.is_closed = False
        self.max_queued = 1 << 20
        self.num_read = 0
        self.reads: list[tuple[int, list[bytes]]] = []
        self._block_bytes = block_bytes
        self._seconds_per_block = seconds_per_block
        self._capacity = capacity

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def num_pending_writes(self) -> int:
        return 0

    @property
    def num_pending_reads(self) -> int:
        return sum(len(names) for _, names in self.reads)

    @property
    def seconds_per_block(self) -> float | None:
        return self._seconds_per_block

    def contains(self, name: bytes) -> bool:
        return name in self.blocks

    def has_room(self, num_blocks: int) -> bool:
        return self.is_on and num_blocks <= self.max_queued

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        check_blocks(names, blocks, self.block_bytes)
        assert len(names) <= self.max_queued
        for name, block in zip(names, blocks, strict=True):
            assert name not in self.blocks, "a block is written twice"
            self.blocks[name] = block.copy()

    def read(self, ticket: int, names: Sequence[bytes]) -> None:
        assert names
        self.num_read += len(names)
        self.reads.append((ticket, list(names)))

    def completed(self) -> list[ReadDone]:
        if self.is_stuck:
            return []
        reads, self.reads = self.reads, []
        return [ReadDone(ticket, self._find(names)) for ticket, names in reads]

    def forget(self, owner: bytes) -> None:
        for name in [name for name in self.blocks if name.startswith(owner)]:
            del self.blocks[name]

    def stats(self) -> TierStats:
        num_blocks = len(self.blocks)
        capacity_bytes, used_bytes = self._capacity * self.block_bytes, num_blocks * self.block_bytes
        return TierStats("disk", capacity_bytes, used_bytes, num_blocks, 0, num_blocks, 0, 0, 0, self.is_on)

    def stats_of_stores(self) -> list[TierStats]:
        return [self.stats()]

    def close(self, timeout: float) -> None:
        self.is_closed = True

    def _find(self, names: Sequence[bytes]) -> BlockBytes:
        found = np.zeros((0, self.block_bytes), np.uint8)
        for name in names:
            if name in self.lost or name not in self.blocks:
                self.blocks.pop(name, None)
                self.lost.discard(name)
                break
            found = np.concatenate([found, self.blocks[name][None]])
        return found

"""Blocks in the host's memory."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from radixserve.core.block_store import BlockBytes, ReadDone, check_blocks
from radixserve.errors import ConfigError
from radixserve.protocol import TierStats
from radixserve.tiers.read_rate import ReadRate


class MemoryStore:
    """A BlockStore in the host's memory, for K/V that lives on a device; the least recently used block gives way.

    Writes and reads are copies and done at once. Memory is claimed as blocks come, up to capacity_bytes.
    clock: seconds, from any beginning on. Raises ConfigError if not even one block fits.
    """

    def __init__(
        self, block_bytes: int, capacity_bytes: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        num_slots = capacity_bytes // block_bytes
        if num_slots < 1:
            raise ConfigError(
                f"the K/V cache's host memory is given {capacity_bytes} bytes, and one block has {block_bytes}; "
                "raise --kv-cache-host-memory"
            )
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_bytes
        self._slots: BlockBytes = np.empty((num_slots, block_bytes), dtype=np.uint8)
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used name first
        self._free_slots: list[int] = []  # that were taken before
        self._done: list[ReadDone] = []
        self._clock = clock
        self._rate = ReadRate()
        self._num_hits = 0
        self._num_written = 0
        self._num_dropped = 0
        self._is_open = True

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def num_pending_writes(self) -> int:
        return 0

    @property
    def num_pending_reads(self) -> int:
        return sum(len(done.blocks) for done in self._done)

    @property
    def seconds_per_block(self) -> float | None:
        return self._rate.seconds_per_block

    def contains(self, name: bytes) -> bool:
        return name in self._slot_of

    def has_room(self, num_blocks: int) -> bool:
        return self._is_open

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        check_blocks(names, blocks, self.block_bytes)
        if not self._is_open:
            self._num_dropped += len(names)
            return
        for name, block in zip(names, blocks, strict=True):
            if name in self._slot_of:
                self._slot_of.move_to_end(name)
                continue
            slot = self._free_slot()
            self._slots[slot] = block
            self._slot_of[name] = slot
            self._num_written += 1

    def read(self, ticket: int, names: Sequence[bytes]) -> None:
        started = self._clock()
        slots = []
        for name in names:
            slot = self._slot_of.get(name)
            if slot is None:
                break
            slots.append(slot)
        blocks = self._slots[slots]  # a copy, as it is picked by a list
        for name in reversed(names[: len(slots)]):
            self._slot_of.move_to_end(name)
        self._rate.record(len(slots), self._clock() - started)
        self._num_hits += len(slots)
        self._done.append(ReadDone(ticket, blocks))

    def completed(self) -> list[ReadDone]:
        done, self._done = self._done, []
        return done

    def forget(self, owner: bytes) -> None:
        for name in [name for name in self._slot_of if name.startswith(owner)]:
            self._free_slots.append(self._slot_of.pop(name))

    def stats(self) -> TierStats:
        return TierStats(
            name="host",
            capacity_bytes=self._capacity_bytes,
            used_bytes=len(self._slot_of) * self.block_bytes,
            num_blocks=len(self._slot_of),
            num_hit_blocks=self._num_hits,
            num_written_blocks=self._num_written,
            num_read_blocks=self._num_hits,
            num_dropped_blocks=self._num_dropped,
            num_failed_blocks=0,
            is_on=self._is_open,
        )

    def stats_of_stores(self) -> list[TierStats]:
        return [self.stats()]

    def close(self, timeout: float) -> None:
        self._is_open = False
        self._slot_of.clear()
        self._done.clear()

    def _free_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        if len(self._slot_of) < len(self._slots):
            return len(self._slot_of)  # without free ones in between, slots are taken in order
        return self._slot_of.popitem(last=False)[1]

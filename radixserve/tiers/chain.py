"""Several stores as one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

import numpy as np

from radixserve.core.block_store import BlockBytes, BlockStore, ReadDone
from radixserve.protocol import TierStats


class Chain:
    """A BlockStore of stores of one block size, the fastest first.

    A block is written to all of them and read from the first that has it. Handing down only what a faster store gives
    up would save the slower one writes, but what the faster one holds would then be lost with the process.
    """

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        if len({store.block_bytes for store in stores}) != 1:
            raise ValueError("a chain takes one store or more, of blocks of one size")
        self._stores = list(stores)
        self._tickets = count()
        self._reads: dict[int, _Read] = {}
        self._done: list[ReadDone] = []
        self._num_pending_reads = 0

    @property
    def block_bytes(self) -> int:
        return self._stores[0].block_bytes

    @property
    def num_pending_writes(self) -> int:
        return max(store.num_pending_writes for store in self._stores)

    @property
    def num_pending_reads(self) -> int:
        return self._num_pending_reads

    @property
    def seconds_per_block(self) -> float | None:
        """The slowest store's, so that a read is never said to be faster than it is."""
        return max((rate for store in self._stores if (rate := store.seconds_per_block) is not None), default=None)

    def contains(self, name: bytes) -> bool:
        return any(store.contains(name) for store in self._stores)

    def has_room(self, num_blocks: int) -> bool:
        """Return whether all stores that are on would take so many blocks now, and one is on."""
        # A store that is off has no room even for no blocks.
        on = [store for store in self._stores if store.stats().is_on]
        return bool(on) and all(store.has_room(num_blocks) for store in on)

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        for store in self._stores:
            store.write(names, blocks)

    def read(self, ticket: int, names: Sequence[bytes]) -> None:
        runs = [(index, list(run)) for index, run in groupby(names, key=self._store_of)]
        read = _Read(ticket)
        for index, run in runs:
            if index is None:
                break
            part = next(self._tickets)
            read.num_asked[part] = len(run)
            self._num_pending_reads += len(run)
            self._reads[part] = read
            self._stores[index].read(part, run)
        if not read.num_asked:
            self._done.append(ReadDone(ticket, np.empty((0, self.block_bytes), dtype=np.uint8)))

    def completed(self) -> list[ReadDone]:
        done, self._done = self._done, []
        for store in self._stores:
            for part in store.completed():
                read = self._reads.pop(part.ticket)
                read.found[part.ticket] = part.blocks
                if len(read.found) == len(read.num_asked):
                    self._num_pending_reads -= sum(read.num_asked.values())
                    done.append(ReadDone(read.ticket, read.blocks()))
        return done

    def forget(self, owner: bytes) -> None:
        for store in self._stores:
            store.forget(owner)

    def stats(self) -> TierStats:
        """Return what `stats_of_stores` says, added up."""
        stats = self.stats_of_stores()
        return TierStats(
            name="+".join(tier.name for tier in stats),
            capacity_bytes=sum(tier.capacity_bytes for tier in stats),
            used_bytes=sum(tier.used_bytes for tier in stats),
            num_blocks=sum(tier.num_blocks for tier in stats),
            num_hit_blocks=sum(tier.num_hit_blocks for tier in stats),
            num_written_blocks=sum(tier.num_written_blocks for tier in stats),
            num_read_blocks=sum(tier.num_read_blocks for tier in stats),
            num_dropped_blocks=sum(tier.num_dropped_blocks for tier in stats),
            num_failed_blocks=sum(tier.num_failed_blocks for tier in stats),
            is_on=any(tier.is_on for tier in stats),
        )

    def stats_of_stores(self) -> list[TierStats]:
        """Return each store's counters and gauges."""
        return [store.stats() for store in self._stores]

    def close(self, timeout: float) -> None:
        for store in self._stores:
            store.close(timeout)

    def _store_of(self, name: bytes) -> int | None:
        return next((index for index, store in enumerate(self._stores) if store.contains(name)), None)


@dataclass(slots=True)
class _Read:
    """A read in parts, in the order of its blocks: by ticket, how many were asked for and what has come."""

    ticket: int
    num_asked: dict[int, int] = field(default_factory=dict)
    found: dict[int, BlockBytes] = field(default_factory=dict)

    def blocks(self) -> BlockBytes:
        """Return the blocks up to the first that has not been found, when all parts have come."""
        parts = []
        for ticket, num_asked in self.num_asked.items():
            parts.append(self.found[ticket])
            if len(self.found[ticket]) < num_asked:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

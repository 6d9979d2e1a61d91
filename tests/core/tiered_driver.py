"""A Driver with a store below its cache, whose blocks hold what the shadow of the K/V held."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from radixserve.core.batch import SampledTokens
from radixserve.core.block_store import BlockBytes
from radixserve.core.cache_observer import CacheObserver
from radixserve.core.sequence import Sequence
from radixserve.core.tiers.tiers import CacheTiers
from tests.core.driver import Driver, Prefix
from tests.fake_store import FakeStore

SLOT_BYTES = 8


class ShadowStore(FakeStore):
    """A FakeStore of shadows: of each slot, its number among contents. To a pickle of the cache it makes no difference.

    contents: all that a slot ever held.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(SLOT_BYTES * block_size)
        self.contents: list[Prefix | None] = []

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return ShadowStore, (1,)

    def pack(self, blocks: list[list[Prefix | None]]) -> BlockBytes:
        start = len(self.contents)
        self.contents += [prefix for block in blocks for prefix in block]
        numbers = np.arange(start, len(self.contents), dtype=np.int64)
        return numbers.view(np.uint8).reshape(len(blocks), self.block_bytes)

    def unpack(self, blocks: BlockBytes) -> list[list[Prefix | None]]:
        numbers = np.ascontiguousarray(blocks).view(np.int64)
        return [[self.contents[number] for number in block] for block in numbers.tolist()]


class _Released(CacheObserver):
    """Collects the blocks that sequences give back, loads among them."""

    def __init__(self) -> None:
        self.block_ids: set[int] = set()

    def release(self, sequence: Sequence) -> None:
        self.block_ids.update(sequence.block_table)


class TieredDriver(Driver):
    """Spills and loads as a scheduler and an executor do. num_loaded: blocks that came back."""

    num_loaded = 0

    def __init__(self, num_blocks: int, block_size: int, store: ShadowStore | None = None, **settings: Any) -> None:
        super().__init__(num_blocks, block_size, **settings)
        self.store = store or ShadowStore(block_size)
        self.tiers = CacheTiers(self.cache, self.store)
        self._released = _Released()
        self.cache.add_observer(self._released)
        self._held: set[int] = set()
        self._settings = settings
        self._num_steps = 0

    def restarted(self) -> "TieredDriver":
        """Return one with an empty cache over the same store."""
        store = ShadowStore(self.block_size)
        store.blocks, store.contents = self.store.blocks, self.store.contents
        return TieredDriver(self.num_blocks, self.block_size, store, **self._settings)

    def take_held(self) -> set[int]:
        """Return the blocks that loads have held since the last call."""
        held, self._held = self._held, set()
        return held

    def execute(self, rows: list[tuple[Sequence, int]]) -> None:
        """Copy blocks out, then in, then run the rows, which may copy and write what was copied out or in."""
        self._num_steps += 1
        loads = self._schedule_loads(is_busy=self._num_steps % 2 == 0)
        spilled = self.store.pack([self._block(i) for i in self.tiers.schedule_spills(is_busy=bool(rows))])
        for block_id, content in loads:
            for offset, prefix in enumerate(content):
                self.shadow[block_id, offset] = prefix
        self._released.block_ids.clear()
        self.tiers.finish(SampledTokens([], [], [], spilled=spilled))
        self._held |= self._released.block_ids
        super().execute(rows)

    def fail(self) -> None:
        """Lose a step after it was scheduled: what was to be loaded into is garbage."""
        for block_id, content in self._schedule_loads(is_busy=False):
            for offset in range(len(content)):
                self.shadow[block_id, offset] = None
        self.tiers.schedule_spills(is_busy=False)
        self._released.block_ids.clear()
        self.tiers.fail()
        self._held |= self._released.block_ids

    def stored(self) -> list[Prefix]:
        """Return the prefix that each block of the store is the last one of."""
        return [_prefix_of(block) for block in self._stored_blocks()]

    def check(self, sources: Iterable[int] = ()) -> None:
        """Each block in the store holds one prefix, too."""
        super().check(sources)
        for block in self._stored_blocks():
            namespace, token_ids = _prefix_of(block)
            ends = range(len(token_ids) - self.block_size + 1, len(token_ids) + 1)
            assert block == [(namespace, token_ids[:end]) for end in ends]

    def _stored_blocks(self) -> list[list[Prefix | None]]:
        return self.store.unpack(np.stack(list(self.store.blocks.values()))) if self.store.blocks else []

    def _schedule_loads(self, *, is_busy: bool) -> list[tuple[int, list[Prefix | None]]]:
        was_findable = self.findable()
        loads = self.tiers.schedule_loads(self.cache.num_available_blocks, is_busy=is_busy)
        self._count_evicted(was_findable, None)
        if loads is None:
            return []
        TieredDriver.num_loaded += len(loads.block_ids)
        return list(zip(loads.block_ids, self.store.unpack(loads.blocks), strict=True))


def _prefix_of(block: list[Prefix | None]) -> Prefix:
    last = block[-1]
    assert last is not None, "garbage was written to the store"
    return last

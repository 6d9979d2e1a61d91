"""Blocks that come back from a store into the pool, for sequences that wait to start."""

import itertools
from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np

from radixserve.core.batch import BlockLoads
from radixserve.core.block_store import BlockBytes, BlockStore
from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.sequence import Sequence, SequenceStatus
from radixserve.core.tiers.block_names import BlockNames
from radixserve.core.tiers.choice import Rates, is_reading_faster, patience
from radixserve.core.tiers.load_wait import LoadWait

# A long prefix is read in parts of so many bytes, and a step copies one of them into the pool: but less beside rows, so
# that these are not held up. 4 MiB take a millisecond.
MAX_READ_BYTES = 32 * 2**20
MAX_LOADED_BYTES_BUSY = 4 * 2**20
# So many reads are under way at most: what they have found lies in memory until a step takes it.
MAX_READS = 4
# So often a sequence has its blocks read, if they find no room in the pool or are evicted again before it starts.
MAX_READS_IN_VAIN = 3
# Each so manieth time that computing seems faster, a read is tried all the same: what a disk can do changes.
TRIED_EVERY = 32


@dataclass(slots=True, eq=False)
class _Read:
    """A read of the blocks of a sequence from number index on.

    loader: takes them into the pool. blocks: what was found, once it is there. is_wanted: nobody has dropped it since.
    """

    sequence: Sequence
    loader: Sequence
    index: int
    names: list[bytes]
    blocks: BlockBytes | None = None
    is_wanted: bool = True


@dataclass(slots=True, frozen=True)
class _Load:
    """What a step copies into the pool of a read. is_last: no more of it is left."""

    read: _Read
    blocks: BlockBytes
    is_last: bool


class Loads:
    """Reads what a store has behind the cached prefix of waiting sequences, and loads it into the pool.

    A load is a sequence of its own, of the request that it is for: it attaches the cached prefix, gets room behind it,
    and gives all of it back to the tree after the step that has copied the blocks in. So a block that comes back is
    like one that its request has computed and was then preempted. Nobody is preempted for it; what has no room is
    dropped. Several who wait for the same blocks wait for one read.

    compute_rate: seconds that computing a block takes; None if it was not measured yet.
    """

    def __init__(self, cache: KVCache, store: BlockStore, names: BlockNames) -> None:
        self._cache = cache
        self._store = store
        self._names = names
        self._clock = cache.clock
        self._max_blocks = max(MAX_READ_BYTES // store.block_bytes, 1)
        self._tickets = itertools.count()
        self._reads: dict[int, _Read] = {}
        self._arrived: deque[_Read] = deque()
        # Each block on its way into the tree.
        self._coming: dict[bytes, _Read] = {}
        self._loading: list[_Load] = []
        self._num_refusals = 0
        self.compute_rate: float | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether something is being read or is to be loaded."""
        return bool(self._reads or self._arrived)

    def awaits(self, sequence: Sequence, match: Match) -> bool:
        """Whether a sequence whose turn it is, and of which match is cached, is to wait for more; if so, it is read.

        It waits for each part of its prefix until it is there, and as long as patience says.
        """
        wait = self.prefetch(sequence, match)
        if wait is None:
            return False
        now = self._clock()
        if wait.deadline is None:
            wait.deadline = now + wait.patience
        wait.is_over = now >= wait.deadline
        return not wait.is_over

    def prefetch(self, sequence: Sequence, match: Match) -> LoadWait | None:
        """Read what is to be read for a waiting sequence, of which match is cached; return its wait for that."""
        index, wait = len(match.block_ids), sequence.load_wait
        if index >= self._num_wanted(sequence) or (wait is not None and wait.is_over):
            return None
        self._names.tell(sequence, match.block_ids)
        name = self._cache.keys.name_of(sequence, index)
        if wait is None or wait.index < index:
            wait = self._begin_wait(sequence, index, name)
            if wait is None:
                return None
            sequence.load_wait = wait
        if name not in self._coming and not wait.is_over:
            wait.is_over = wait.num_reads == MAX_READS_IN_VAIN or not self._store.contains(name)
            if not wait.is_over:
                wait.num_reads += self._read(sequence, index)
        return None if wait.is_over else wait

    def schedule(self, num_spare_blocks: int, *, is_busy: bool) -> BlockLoads | None:
        """Return what the step copies into the pool, into blocks that nobody who runs is going to need.

        is_busy: the step computes something too.
        """
        for ticket, blocks in self._store.completed():
            read = self._reads.pop(ticket)
            read.blocks = blocks
            if read.is_wanted:
                self._arrived.append(read)
        num_left = max(MAX_LOADED_BYTES_BUSY // self._store.block_bytes, 1) if is_busy else self._max_blocks
        block_ids, parts = array("i"), []
        while self._arrived and num_left > 0:
            read = self._arrived.popleft()
            load = self._allocate(read, num_left, min(num_spare_blocks, self._cache.num_available_blocks))
            if load is None:
                self._forget(read)
                continue
            self._loading.append(load)
            num_blocks = len(load.blocks)
            block_ids += read.loader.block_table[-num_blocks:]
            parts.append(load.blocks)
            num_spare_blocks -= num_blocks
            num_left -= num_blocks
        if not parts:
            return None
        return BlockLoads(block_ids, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def finish(self, *, has_failed: bool = False) -> None:
        """Let those find the blocks that the step has loaded, and read on behind them. has_failed: it has not."""
        loading, self._loading = self._loading, []
        for load in reversed(loading):
            read, loader = load.read, load.read.loader
            if not has_failed:
                loader.num_computed_tokens += len(load.blocks) * self._cache.block_size
                self._cache.commit(loader)
            self._cache.release(loader)
            if load.is_last or has_failed:
                self._forget(read)
            else:
                self._arrived.appendleft(read)
        for read in (load.read for load in loading):
            if read.sequence.status is SequenceStatus.WAITING:
                self.prefetch(read.sequence, self._cache.match(read.sequence))

    def reset(self, tenant: str | None) -> None:
        """Load nothing of what is on its way for a tenant, or for anyone if that is None."""
        for read in (*self._reads.values(), *self._arrived):
            if tenant in (None, read.sequence.request.tenant):
                read.is_wanted = False
                self._forget(read)
        self._arrived = deque(read for read in self._arrived if read.is_wanted)

    def _num_wanted(self, sequence: Sequence) -> int:
        """Return how many blocks of a sequence can be read instead of computed."""
        return sequence.num_reusable_tokens // self._cache.block_size

    def _begin_wait(self, sequence: Sequence, index: int, name: bytes) -> LoadWait | None:
        """Return the wait for the block of number index and those behind it; None if it is to be computed."""
        rates = Rates(self._store.seconds_per_block, self.compute_rate)
        coming = self._coming.get(name)
        num_blocks = len(self._names_to_read(sequence, index)) if coming is None else len(coming.names)
        if not num_blocks:
            return None
        if coming is None and not is_reading_faster(rates, num_blocks, self._store.num_pending_reads):
            self._num_refusals += 1
            if self._num_refusals % TRIED_EVERY:
                return LoadWait(index, patience=0.0, is_over=True)
        return LoadWait(index, patience(rates, num_blocks))

    def _names_to_read(self, sequence: Sequence, index: int) -> list[bytes]:
        """Return the names of a sequence's blocks from number index on that one read brings."""
        names = []
        for number in range(index, min(index + self._max_blocks, self._num_wanted(sequence))):
            name = self._cache.keys.name_of(sequence, number)
            if name in self._coming or not self._store.contains(name):
                break
            names.append(name)
        return names

    def _read(self, sequence: Sequence, index: int) -> bool:
        """Begin to read a sequence's blocks from number index on; False: too much is being read."""
        if len(self._reads) + len(self._arrived) >= MAX_READS:
            return False
        names, ticket = self._names_to_read(sequence, index), next(self._tickets)
        read = self._reads[ticket] = _Read(sequence, _loader(sequence), index, names)
        self._coming.update(dict.fromkeys(names, read))
        self._store.read(ticket, names)
        return True

    def _allocate(self, read: _Read, max_blocks: int, num_room: int) -> _Load | None:
        """Make room for what was read behind what is cached, at most max_blocks, and return it.

        None: there is no room for all of it, the prefix is cached no longer, or the blocks are there already.
        """
        assert read.blocks is not None
        size, end = self._cache.block_size, read.index + len(read.blocks)
        loader = read.loader
        loader.use = read.sequence.use
        match = self._cache.match(loader)
        first = len(match.block_ids)
        if not read.index <= first < end or end - first > num_room:
            return None
        num_blocks = min(end - first, max_blocks)
        match = match._replace(num_tokens=first * size, partial_block_id=None)
        if not self._cache.allocate(loader, num_blocks * size, match):
            return None
        # To the order of eviction, what its request does next continues this.
        read.sequence.use = loader.use
        start = first - read.index
        return _Load(read, read.blocks[start : start + num_blocks], is_last=first + num_blocks == end)

    def _forget(self, read: _Read) -> None:
        for name in read.names:
            self._coming.pop(name, None)


def _loader(sequence: Sequence) -> Sequence:
    """Return a sequence of the same request that has the same tokens and no blocks."""
    loader = Sequence(sequence.request, sequence.choice_index, sequence.token_ids[:])
    loader.digests, loader.names = sequence.digests[:], sequence.names[:]
    return loader

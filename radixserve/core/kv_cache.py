"""The K/V cache as the scheduler sees it: sequences ask for room, share what others computed, and give it back."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from radixserve.core.batch import BlockCopy
from radixserve.core.block_keys import BlockKeys, owner_of
from radixserve.core.block_pool import BlockPool
from radixserve.core.block_use import BlockUse
from radixserve.core.cache_observer import CacheObserver, RemovalReason
from radixserve.core.cache_settings import CacheSettings
from radixserve.core.eviction.answer import Answer
from radixserve.core.eviction.learned_reuse import LearnedReuse
from radixserve.core.eviction.lru import LeastRecentlyUsed
from radixserve.core.eviction.order import EvictionOrder
from radixserve.core.lost_prefixes import LostPrefixes
from radixserve.core.namespace import tenant_of
from radixserve.core.pins import Pins
from radixserve.core.public_prefixes import PublicPrefixes
from radixserve.core.radix_tree import Match, Place, RadixTree, Removal
from radixserve.core.sequence import Sequence
from radixserve.core.token_counts import TokenCounts
from radixserve.core.tree_walk import CachedRun
from radixserve.protocol import CacheStats, TenantStats

__all__ = ["Answer", "CacheSettings", "CachedRun", "KVCache", "Match"]

_DEFAULTS = CacheSettings()


class _Source(NamedTuple):
    """The block that a sequence copies from in this step, and how much of the sequence was computed before it."""

    block_id: int
    num_computed_tokens: int


class KVCache:
    """Give blocks to sequences, and share equal prefixes between them.

    In each step: match and allocate, take_copies, run the batch, advance num_computed_tokens, commit, end_step. A
    sequence is forked or released between steps, or in a step before its own allocate or after its own commit. It is
    truncated between steps, or in a step before take_copies or once its num_computed_tokens is advanced.
    keys: the paths, digests and names of sequences' blocks. use: when blocks were used. pins: what is kept from
    eviction, and for how long. lost: what was evicted. clock, store: the settings'.
    """

    def __init__(self, num_blocks: int, block_size: int, settings: CacheSettings = _DEFAULTS) -> None:
        self._block_size = block_size
        self._prefix_cache = settings.prefix_cache
        public_prefixes = PublicPrefixes(settings.public_prefixes, block_size)
        self.keys = BlockKeys(public_prefixes, block_size, settings.digest, settings.build)
        self._tree = RadixTree(num_blocks, block_size, settings.digest)
        self._order: EvictionOrder
        if settings.eviction_policy == "learned-reuse":
            self._order = LearnedReuse(num_blocks, self._tree, self.keys)
        else:
            self._order = LeastRecentlyUsed(num_blocks, self._tree.last_blocks)
        self._pool = BlockPool(num_blocks, self._order)
        self.clock, self.store = settings.clock, settings.store
        self.use = BlockUse(num_blocks, settings.clock)
        max_pinned_blocks = int(settings.max_pinned_share * num_blocks)
        self.pins = Pins(self._pool, self._tree, self.keys, max_pinned_blocks, settings.clock)
        self.lost = LostPrefixes(block_size, self.keys, self.use, self.pins, num_blocks, settings.max_lost_blocks)
        self._observers: list[CacheObserver] = [self._order, self.use, self.pins, self.lost]
        self._queued_copies: dict[Sequence, BlockCopy] = {}
        self._sources: dict[Sequence, _Source] = {}
        self._counts = TokenCounts()

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def tree(self) -> RadixTree:
        """Where cached blocks are found. To be read only."""
        return self._tree

    @property
    def shares_prefixes(self) -> bool:
        """Whether what one sequence computed is found by others."""
        return self._prefix_cache

    @property
    def num_available_blocks(self) -> int:
        """Blocks that neither a sequence nor a pin holds: free ones, and cached ones that eviction can take."""
        return self._pool.num_free + self._pool.num_evictable

    @property
    def num_in_use_blocks(self) -> int:
        """Blocks that a sequence holds, be it one that loads them from a tier, or that are the source of a copy."""
        return self._pool.num_in_use

    def is_pinned(self, block_id: int) -> bool:
        """Whether a pin keeps a block from eviction."""
        return self.pins.is_pinned(block_id)

    def num_holders(self, block_id: int) -> int:
        """How many sequences hold a block."""
        return self._pool.refcount(block_id)

    def add_observer(self, observer: CacheObserver) -> None:
        """Tell an observer what happens from now on."""
        self._observers.append(observer)

    def match(self, sequence: Sequence, known: Match | None = None) -> Match:
        """Look up the longest cached prefix of a sequence, at most its num_reusable_tokens.

        known: an earlier match of the same sequence, which makes this one cheap, whatever has happened since, as long
        as its tokens were not cut.
        Pure: changes neither blocks nor their ages; it may extend sequence.digests.
        """
        return self._find(sequence, sequence.num_reusable_tokens, known)

    def num_held_blocks(self, match: Match) -> int:
        """How many of a match's full blocks a sequence or a pin holds; the rest is among num_available_blocks."""
        # Whoever holds a block holds those above it, so the held ones come first.
        return bisect_left(match.block_ids, True, key=self._pool.is_evictable)

    def allocate(self, sequence: Sequence, num_tokens: int, match: Match | None = None) -> bool:
        """Make room for K/V of a sequence's next num_tokens tokens, evicting cached blocks if need be.

        match: what to attach first, for a sequence that holds no blocks; its block_table, num_computed_tokens and
        num_committed_blocks are set. A hit inside a block queues a copy of it, or takes the block over if it is the
        tail of an ended sequence and wholly matched. If that does not fit, the full blocks alone are attached, so read
        num_computed_tokens afterwards.
        Returns False, and has changed nothing, if there is no room.
        """
        if match is None:
            return self._extend(sequence, num_tokens)
        assert not sequence.block_table
        if match.num_removals != self._tree.num_removals:
            match = self._find(sequence, match.num_tokens)
        if self._attach(sequence, num_tokens, match):
            return True
        if match.partial_block_id is None:
            return False
        num_full_tokens = len(match.block_ids) * self._block_size
        return self._attach(sequence, num_tokens, match._replace(num_tokens=num_full_tokens, partial_block_id=None))

    def break_pins(self, sequence: Sequence, num_tokens: int, match: Match | None = None) -> bool:
        """End pins, as few as needed, so that an allocate of the same arguments, which found no room, finds it now.

        For a sequence that is alone: where others run, it waits for them instead. Returns False, and has changed
        nothing, if the room is not there without pins either.
        """
        if match is None:
            num_new, held = sum(self._num_new_and_copies(sequence, num_tokens)), array("i")
        else:
            if match.num_removals != self._tree.num_removals:
                match = self._find(sequence, match.num_tokens)
            held = match.block_ids
            num_new = self._num_blocks_for(len(held) * self._block_size + num_tokens) - len(held)
        num_missing = num_new + self._pool.count_evictable(held) - self.num_available_blocks
        return self.pins.break_for(num_missing, held)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child without blocks share all K/V of its parent, a part-filled block too.

        The child's tokens must begin with the parent's computed ones. Whoever writes first into a shared block gets a
        copy of it, by allocate.
        """
        assert not child.block_table
        # Full blocks enter the tree now, while the parent alone holds them: see commit.
        self.commit(parent)
        child.block_table = parent.block_table[: self._num_blocks_for(parent.num_computed_tokens)]
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_committed_blocks = parent.num_committed_blocks
        child.digests = parent.digests[: parent.num_computed_tokens // self._block_size]
        child.names = parent.names[: parent.num_computed_tokens // self._block_size]
        self._order.fork(parent, child)
        self._pool.share(child.block_table)

    def commit(self, sequence: Sequence) -> None:
        """Enter a sequence's full and computed blocks into the tree, so that others can share them from now on.

        Where the tree has such a block already, the sequence switches to that one and gives up its own.
        """
        if not self._prefix_cache:
            return
        num_full = sequence.num_computed_tokens // self._block_size
        while sequence.num_committed_blocks < num_full and self._commit_run(sequence, num_full):
            pass

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back from a sequence, deepest first, which leaves it as if it had never run.

        Committed blocks stay findable, and so does a part-filled last one below them. A copy that is still to be made
        for the sequence is forgotten.
        """
        source = self._sources.get(sequence)
        self._forget_copy(sequence)
        if source is None or sequence.num_computed_tokens > source.num_computed_tokens:
            self._keep_tail(sequence)
        self.pins.cover_tails(sequence)
        for observer in self._observers:
            observer.release(sequence)
        self._drop_behind(sequence, 0)
        sequence.num_computed_tokens = 0
        sequence.num_committed_blocks = 0

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give up a sequence's K/V from its token num_tokens on, as a refused draft demands.

        num_computed_tokens falls to num_tokens, and the blocks behind are given back; committed ones stay findable. A
        prompt that begins with a public prefix must stay whole.
        token_ids are the caller's to cut, before the sequence is passed to any other call. Where it goes on inside a
        block that is shared or findable, the next allocate gives it its own copy.
        """
        assert num_tokens <= sequence.num_computed_tokens
        num_full = num_tokens // self._block_size
        num_kept = self._num_blocks_for(num_tokens)
        source = self._sources.get(sequence)
        if source is not None and num_kept <= source.num_computed_tokens // self._block_size:
            self._forget_copy(sequence)
        self._drop_behind(sequence, num_kept)
        sequence.num_computed_tokens = num_tokens
        sequence.num_committed_blocks = min(sequence.num_committed_blocks, num_full)
        del sequence.digests[num_full:]
        del sequence.names[num_full:]

    def next_digest(self, sequence: Sequence, num_blocks: int) -> bytes | None:
        """Return the chained digest of the block behind a sequence's first num_blocks, or None if it is not full.

        Two sequences with equal digests there are about to compute the same block. Without a prefix cache, None.
        """
        if not self._prefix_cache or (num_blocks + 1) * self._block_size > sequence.num_tokens:
            return None
        return self.keys.digest_of(sequence, num_blocks)

    def namespace_of(self, sequence: Sequence, num_blocks: int) -> bytes:
        """Return the namespace of the block behind a sequence's first num_blocks."""
        return self.keys.path_of(sequence).namespace_of(num_blocks)

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies queued since the last call. Their sources are held until end_step."""
        copies = list(self._queued_copies.values())
        self._queued_copies.clear()
        return copies

    def end_step(self) -> None:
        """Let the sources of copies go: the step that made them is over."""
        for source in self._sources.values():
            self._drop_source(source)
        self._sources.clear()

    def record_query(self, tenant: str | None, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count the tokens of a tenant's new request, and those of them that were found, public ones too."""
        self._counts.query(tenant, num_queried_tokens, num_hit_tokens)

    def record_answer(self, sequence: Sequence, answer: Answer) -> None:
        """Tell how a sequence's answer ended, once, before or after its release, for the order of eviction.

        It has no effect on blocks that others have used since.
        """
        self._order.record_answer(sequence, answer)

    def reset(self, tenant: str | None = None) -> tuple[int, int]:
        """Forget every cached block of a tenant, or of all tenants, and all public ones, if None is given.

        Pins of theirs end, and what lower tiers have of them is dropped. Returns how many blocks of the pool were
        dropped, and how many stay findable as they are in use.
        """
        self.pins.reset(tenant)
        if self.store is not None:
            self.store.forget(b"" if tenant is None else owner_of(tenant))
        num_dropped = 0
        # Each node before those above it, so that what is dropped is always the end of a leaf.
        for run in reversed(list(self._tree.walk())):
            if tenant is None or tenant_of(run.namespace) == tenant:
                num_cached = self._pool.count_evictable(run.block_ids)
                if num_cached:
                    self._remove(run.block_ids[-1], num_cached, RemovalReason.RESET)
                    num_dropped += num_cached
        return num_dropped, self._tree.num_blocks if tenant is None else self._tree.num_blocks_of(tenant)

    def walk(self) -> Iterator[CachedRun]:
        """Yield every node of the tree, each before those below it."""
        return self._tree.walk()

    def stats(self) -> CacheStats:
        """Return the counters and gauges, in constant time."""
        counts = self._counts.all
        return CacheStats(
            block_size=self._block_size,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            num_in_use_blocks=self._pool.num_in_use,
            num_queried_tokens=counts.num_queried,
            num_hit_tokens=counts.num_hit,
            num_evicted_tokens=counts.num_evicted,
            num_tree_nodes=self._tree.num_nodes,
            tree_depth=self._tree.depth,
            num_pinned_blocks=self.pins.num_blocks,
            num_broken_pins=self.pins.num_broken,
        )

    def tenant_stats(self, tenant: str | None, running: Iterable[Sequence], num_waiting: int) -> TenantStats:
        """Return the counters and gauges of one tenant, whose sequences are running and num_waiting more.

        Public blocks are nobody's: they count for a tenant while its sequences hold them, as in use, and as what its
        requests found. Takes time proportional to the blocks that it has in use. To be called between steps.
        """
        sequences = list(running)
        num_findable = _num_distinct(
            self.findable_blocks(sequence)[self.keys.path_of(sequence).num_public_blocks :] for sequence in sequences
        )
        counts = self._counts.of(tenant)
        return TenantStats(
            block_size=self._block_size,
            num_blocks=self._pool.num_blocks,
            num_cached_blocks=self._tree.num_blocks_of(tenant) - num_findable,
            num_in_use_blocks=_num_distinct(sequence.block_table for sequence in sequences),
            num_queried_tokens=counts.num_queried,
            num_hit_tokens=counts.num_hit,
            num_evicted_tokens=counts.num_evicted,
            num_running=len(sequences),
            num_waiting=num_waiting,
            num_pinned_blocks=self.pins.num_blocks_of(tenant),
        )

    def _find(self, sequence: Sequence, max_tokens: int, known: Match | None = None) -> Match:
        if not self._prefix_cache or max_tokens <= 0:
            return Match(array("i"), 0, None, self._tree.num_removals)
        token_ids = np.frombuffer(sequence.token_ids, np.int32, max_tokens)
        return self._tree.find(
            self.keys.path_of(sequence), token_ids, lambda index: self.keys.digest_of(sequence, index), known
        )

    def _attach(self, sequence: Sequence, num_tokens: int, match: Match) -> bool:
        pool, tree = self._pool, self._tree
        partial = match.partial_block_id
        takes_over = (
            partial is not None
            and pool.is_evictable(partial)
            and tree.is_tail(partial, match.num_tokens % self._block_size)
        )
        held = match.block_ids if partial is None else match.block_ids + array("i", [partial])
        num_new = self._num_blocks_for(match.num_tokens + num_tokens) - len(match.block_ids) - takes_over
        if not self._fits(num_new, held):
            return False
        if self._prefix_cache:
            for observer in self._observers:
                observer.begin(sequence, match.block_ids)
        pool.share(match.block_ids)
        table = match.block_ids[:]
        if partial is not None and takes_over:
            self._tell_removed(tree.remove(partial), RemovalReason.COVERED)
            pool.share(array("i", [partial]))
            table.append(partial)
        elif partial is not None:
            table.append(self._take_copy(sequence, partial, match.num_tokens))
            num_new -= 1
        self._take_all(table, num_new)
        sequence.block_table = table
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_committed_blocks = len(match.block_ids)
        return True

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        table = sequence.block_table
        num_new, copies = self._num_new_and_copies(sequence, num_tokens)
        if not self._fits(num_new + copies, array("i")):
            return False
        if copies:
            written = sequence.num_computed_tokens // self._block_size
            source = table[written]
            table[written] = self._take_copy(sequence, source, sequence.num_computed_tokens)
            self._drop(source)
        self._take_all(table, num_new)
        return True

    def _num_new_and_copies(self, sequence: Sequence, num_tokens: int) -> tuple[int, bool]:
        """Return how many blocks a running sequence's next tokens begin, and whether they need a copy of one before."""
        table = sequence.block_table
        written, num_inside = divmod(sequence.num_computed_tokens, self._block_size)
        # A findable one is left from before a truncate: others may read what it holds behind the sequence's tokens.
        copies = num_inside > 0 and (self._pool.refcount(table[written]) > 1 or table[written] in self._tree)
        return max(self._num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(table), 0), copies

    def _fits(self, num_new: int, held: "array[int]") -> bool:
        """Whether num_new blocks can be had while those of held are kept, of which some could be evicted."""
        num_spare = self.num_available_blocks - num_new
        return num_spare >= len(held) or num_spare >= self._pool.count_evictable(held)

    def _take_all(self, table: "array[int]", num_blocks: int) -> None:
        """Append new blocks to a table, for which there must be room."""
        while self._pool.num_free < num_blocks:
            self._evict(num_blocks - self._pool.num_free)
        table.extend(self._pool.take() for _ in range(num_blocks))

    def _take(self) -> int:
        if not self._pool.num_free:
            self._evict(1)
        return self._pool.take()

    def _take_copy(self, sequence: Sequence, source: int, num_computed_tokens: int) -> int:
        """Hold a source, and return the new block that it will be copied to."""
        assert sequence not in self._sources
        self._pool.hold_source(source)
        self._sources[sequence] = _Source(source, num_computed_tokens)
        block_id = self._take()
        self._queued_copies[sequence] = BlockCopy(source, block_id)
        return block_id

    def _evict(self, max_blocks: int) -> None:
        """Free a cached block, and up to max_blocks if more of its run go next."""
        block_id, num_blocks = self._order.first(max_blocks)
        namespace = self._tree.namespace_of(block_id)
        num_tokens = len(self._remove(block_id, num_blocks, RemovalReason.EVICTED).token_ids)
        self._counts.evict(namespace, num_tokens)

    def _remove(self, block_id: int, num_blocks: int, reason: RemovalReason) -> Removal:
        removal = self._tree.remove(block_id, num_blocks)
        self._tell_removed(removal, reason)
        self._pool.free(removal.block_ids)
        return removal

    def _tell_removed(self, removal: Removal, reason: RemovalReason) -> None:
        for observer in self._observers:
            observer.remove(removal, reason)

    def _commit_run(self, sequence: Sequence, num_full: int) -> bool:
        """Enter as many of a sequence's first num_full blocks as one node takes. False if that is none."""
        table, first = sequence.block_table, sequence.num_committed_blocks
        num_public = self.keys.path_of(sequence).num_public_blocks
        if first < num_public:
            num_full = min(num_full, num_public)
        token_ids = sequence.token_ids[first * self._block_size : num_full * self._block_size]
        digest = self.keys.digest_of(sequence, first)
        place = self._place(sequence)
        found = self._tree.find_run(place, digest, token_ids)
        if found:
            for observer in self._observers:
                observer.reuse(sequence, first, found)
            self._pool.share(found)
            for block_id in table[first : first + len(found)]:
                self._drop(block_id)
            table[first : first + len(found)] = found
            sequence.num_committed_blocks += len(found)
            return True
        # Who holds a block of the tree must hold the path above it, which another holder of this block may have in
        # blocks of its own; it enters once a single sequence is left.
        end = next((index for index in range(first, num_full) if self._pool.refcount(table[index]) > 1), num_full)
        if end == first:
            return False
        below = self._tree.add_run(place, digest, token_ids[: (end - first) * self._block_size], table[first:end])
        if below is None:
            # An equal digest of other tokens: this block and those below it stay the sequence's own.
            return False
        for observer in self._observers:
            observer.enter(sequence, first, table[first:end])
        self._remove_shorter_tails(below, token_ids[: self._block_size], table[first])
        sequence.num_committed_blocks = end
        return True

    def _keep_tail(self, sequence: Sequence) -> None:
        """Make a sequence's part-filled last block findable, if it alone knows it and its path is in the tree."""
        num_full = sequence.num_computed_tokens // self._block_size
        token_ids = sequence.token_ids[num_full * self._block_size : sequence.num_computed_tokens]
        if not self._prefix_cache or not token_ids or sequence.num_committed_blocks < num_full:
            return
        block_id = sequence.block_table[num_full]
        place = self._place(sequence)
        is_own = self._pool.refcount(block_id) == 1 and block_id not in self._tree
        if is_own and not self._tree.covers(place, token_ids):
            place = self._tree.add_tail(place, token_ids, block_id)
            for observer in self._observers:
                observer.enter_tail(sequence, block_id)
            self._remove_shorter_tails(place, token_ids, block_id)

    def _remove_shorter_tails(self, place: Place, token_ids: "array[int]", covering_id: int) -> None:
        """Free the tails that a block of these tokens, just added behind a place, makes superfluous."""
        for block_id in self._tree.find_shorter_tails(place, token_ids):
            if self._pool.is_cached(block_id):
                if self.is_pinned(block_id):
                    self.pins.replace_tail(block_id, covering_id)
                self._remove(block_id, 1, RemovalReason.COVERED)

    def findable_blocks(self, sequence: Sequence) -> "array[int]":
        """Return the blocks of a sequence that are in the tree: those it has committed, and one it was truncated to."""
        num_blocks = sequence.num_committed_blocks
        behind = sequence.block_table[num_blocks : num_blocks + 1]
        return sequence.block_table[: num_blocks + any(block_id in self._tree for block_id in behind)]

    def _drop_behind(self, sequence: Sequence, num_kept: int) -> None:
        """Drop all blocks of a sequence but its first num_kept, deepest first."""
        table = sequence.block_table
        num_committed = max(sequence.num_committed_blocks, num_kept)
        for block_id in reversed(table[num_committed:]):
            self._drop(block_id)
        self._pool.drop_findable(table[num_kept:num_committed][::-1])
        sequence.block_table = table[:num_kept]

    def _forget_copy(self, sequence: Sequence) -> None:
        """Let go of what a sequence copies from in this step, if anything, whether or not the copy is made."""
        source = self._sources.pop(sequence, None)
        if source is not None:
            self._queued_copies.pop(sequence, None)
            # The source lies below the sequence's path, so it goes before any block of that.
            self._drop_source(source)

    def _drop(self, block_id: int) -> None:
        self._pool.drop(block_id, is_findable=block_id in self._tree)

    def _drop_source(self, source: _Source) -> None:
        self._pool.drop_source(source.block_id, is_findable=source.block_id in self._tree)

    def _place(self, sequence: Sequence) -> Place:
        num_blocks = sequence.num_committed_blocks
        digest = self.keys.digest_of(sequence, num_blocks - 1) if num_blocks else b""
        return self._tree.place(self.keys.path_of(sequence), sequence.block_table, num_blocks, digest)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _num_distinct(block_tables: "Iterable[array[int]]") -> int:
    """Return how many different blocks there are in all tables together."""
    tables = [np.array(table, np.int32) for table in block_tables]
    return len(np.unique(np.concatenate(tables))) if tables else 0

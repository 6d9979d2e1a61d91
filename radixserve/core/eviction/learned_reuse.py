"""Give up the block that is worth least, by what was learned of when blocks like it are used again.

A use is one request on its path. It leaves *segments*: blocks that it was the last to use, those of one class together.
A later use takes blocks away from a segment's upper end, eviction from its lower end, so a segment is always a part of
one path, and knows no more of its blocks than how many there are and which is the deepest. Along a path the clock of
the last use never grows, as who uses a block uses all those above it.

All of it is counted in requests, and nothing in seconds. Tables and what they say are a tenant's own.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from radixserve.core.block_keys import BlockKeys
from radixserve.core.cache_observer import RemovalReason
from radixserve.core.eviction.answer import Answer
from radixserve.core.eviction.gaps import UNKNOWN_ANSWER, answer_class_of, bucket_borders, bucket_of, gap_class_of
from radixserve.core.eviction.ghosts import Fingerprinter, Fingerprints, Ghosts, num_common
from radixserve.core.eviction.order import EvictionOrder
from radixserve.core.eviction.reuse_tables import ReuseTables
from radixserve.core.eviction.use import Segment, Use
from radixserve.core.eviction.waiting_segments import WaitingSegments
from radixserve.core.packed import indices_of, view_of
from radixserve.core.radix_tree import RadixTree, Removal
from radixserve.core.sequence import Sequence

# How long it is remembered that a block was evicted, in requests since its last use; of how many blocks, at 4 bytes
# each; and of how many segments. No share of the pool, as a small one has the more to remember.
MAX_GHOST_AGE = 2000
MAX_GONE_BLOCKS = 2**20
MAX_GHOSTS = 2**15
# Of how many tenants it is remembered what was learned, though they have nothing in the cache.
MAX_TENANTS = 256
# The share of a request's prompt that another must find, cached or evicted, to continue it.
CONTINUED_SHARE = 0.9

_BORDERS = bucket_borders()


class LearnedReuse(EvictionOrder):
    """The order of eviction that learns when blocks are used again."""

    def __init__(self, num_blocks: int, tree: RadixTree, keys: BlockKeys) -> None:
        self._tree = tree
        self._keys = keys
        self._fingerprinter = Fingerprinter(tree.block_size)
        self._clock = 0
        self._is_unheld = bytearray(num_blocks)
        self._num_unheld = 0
        self._slot_of = array("i", [-1]) * num_blocks
        self._segments: list[Segment | None] = []
        self._free_slots: list[int] = []
        self._waiting = WaitingSegments(self._segments)
        self._segments_at: defaultdict[int, list[Segment]] = defaultdict(list)
        # Of tenants, by name, and of public prefixes, by namespace.
        self._tables: dict[str | bytes | None, ReuseTables] = {}
        self._ghosts = Ghosts()
        self._num_gone = 0

    def __len__(self) -> int:
        return self._num_unheld

    def __contains__(self, block_id: int) -> bool:
        return bool(self._is_unheld[block_id])

    def count(self, block_ids: "array[int]") -> int:
        """Return how many of the blocks are here."""
        return int(np.count_nonzero(self._unheld_view()[indices_of(block_ids)]))

    def add(self, block_id: int) -> None:
        """Let a block come, which is not here."""
        self._is_unheld[block_id] = 1
        self._num_unheld += 1
        self._offer(block_id)

    def add_all(self, block_ids: "array[int]") -> None:
        """Let blocks come, none of which is here, each after those that follow it in the tree."""
        self._unheld_view()[indices_of(block_ids)] = 1
        self._num_unheld += len(block_ids)
        for start, _ in self._runs(block_ids):
            self._offer(block_ids[start])

    def discard(self, block_id: int) -> None:
        """Let a block go, if it is here."""
        self._num_unheld -= self._is_unheld[block_id]
        self._is_unheld[block_id] = 0

    def discard_all(self, block_ids: "array[int]") -> None:
        """Let those blocks go that are here."""
        ids, is_unheld = indices_of(block_ids), self._unheld_view()
        self._num_unheld -= int(np.count_nonzero(is_unheld[ids]))
        is_unheld[ids] = 0

    def first(self, max_blocks: int) -> tuple[int, int]:
        """Return the end of the segment of least score, and how many blocks of it can go."""
        while True:
            segment = self._waiting.first()
            if self._can_go(segment):
                num_blocks = min(segment.num_blocks, max_blocks)
                if num_blocks > 1:
                    # Whoever holds a block holds those above it, so the unheld ones come last.
                    num_blocks = self.count(self._tree.last_blocks(segment.end, num_blocks))
                return segment.end, num_blocks
            # It comes back once its end is given back, or what follows it is gone.
            self._waiting.discard(segment)

    def begin(self, sequence: Sequence, block_ids: "array[int]") -> None:
        """Let a sequence begin, or go on after a preemption, with cached blocks that it does not hold yet."""
        use = sequence.use
        if use is not None:
            # What it has lost meanwhile it computes again, and that comes as new.
            for segment in self._segments_of(use):
                self._forget_gone(segment)
            self._take_over(sequence, use, 0, block_ids)
            return
        use = sequence.use = self._start(sequence)
        # Who else has used a public prefix must make no difference to what is its tenant's own.
        last = self._segment_of(block_ids[-1]).use if len(block_ids) > self._num_public_blocks(sequence) else None
        self._take_over(sequence, use, 0, block_ids)
        num_known, last = self._find_evicted(sequence, use, len(block_ids), last)
        if last is not None and num_known >= CONTINUED_SHARE * last.num_prompt_blocks:
            use.gap_class = gap_class_of(use.clock - last.clock)
        for tables in (use.tables, use.public):
            if tables is not None and tables.is_time_to_learn:
                tables.learn()
                self._waiting.take_in(tables)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child go on from where its parent is."""
        use = parent.use
        if use is not None:
            child.use = replace(use, answer_class=UNKNOWN_ANSWER)

    def reuse(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        """Let a sequence go on, from its block of number index, with cached blocks that it does not hold yet."""
        self._take_over(sequence, self._use_of(sequence), index, block_ids)

    def enter(self, sequence: Sequence, index: int, block_ids: "array[int]") -> None:
        """Let a sequence's blocks from number index on be cached."""
        use, start = self._use_of(sequence), 0
        new_gap_class = 0 if index < self._num_public_blocks(sequence) else use.gap_class
        for end, gap_class in [*use.evicted, (index + len(block_ids), new_gap_class)]:
            run = block_ids[start : max(end - index, start)]
            if run:
                above = block_ids[start - 1] if start else sequence.block_table[index - 1] if index else -1
                self._extend(sequence, use, above, index + start, gap_class, run)
                start += len(run)

    def enter_tail(self, sequence: Sequence, block_id: int) -> None:
        """Let a sequence's part-filled block be cached."""
        use = self._use_of(sequence)
        self._append(self._new_segment(use, use.gap_class, None, None), array("i", [block_id]))

    def record_answer(self, sequence: Sequence, answer: Answer) -> None:
        """Take in how the answer of a sequence ended."""
        use = sequence.use
        if use is None:
            return
        segments = self._segments_of(use)
        for segment in segments:
            segment.figures.unused[segment.bucket] -= segment.num_unused
        use.answer_class = answer_class_of(answer)
        for segment in segments:
            segment.figures.unused[segment.bucket] += segment.num_unused
            self._waiting.move(segment)

    def remove(self, removal: Removal, reason: RemovalReason) -> None:
        """Take in what the tree has forgotten."""
        block_ids = removal.block_ids
        # Eviction takes blocks of one segment, a reset whole runs.
        for start, end in reversed(list(self._runs(block_ids))):
            segment = self._segment_of(block_ids[start])
            segment.num_blocks -= end - start
            segment.end = block_ids[start - 1] if start else removal.end
            if reason is not RemovalReason.EVICTED:
                segment.figures.unused[segment.bucket] -= end - start
            elif segment.above is not None:
                self._remember(segment, removal.token_ids)
            if not segment.num_blocks:
                self._end(segment)
        view_of(self._slot_of)[indices_of(block_ids)] = -1
        if removal.is_end_of_leaf:
            self._offer(removal.end)

    def _use_of(self, sequence: Sequence) -> Use:
        if sequence.use is None:
            sequence.use = self._start(sequence)
        return sequence.use

    def _start(self, sequence: Sequence) -> Use:
        """Let a request start: everything else is older by one."""
        self._clock += 1
        for age, bucket in _BORDERS:
            for segment in self._segments_at.get(self._clock - age, ()):
                unused, num_unused = segment.figures.unused, segment.num_unused
                unused[segment.bucket] -= num_unused
                unused[bucket] += num_unused
                segment.bucket = bucket
                self._waiting.move(segment)
        request = sequence.request
        num_prompt_blocks = request.num_prompt_tokens // self._tree.block_size
        tables = self._tables_of(request.tenant, num_prompt_blocks)
        num_public_blocks = self._num_public_blocks(sequence)
        public = None
        if num_public_blocks:
            public = self._tables_of(self._keys.path_of(sequence).public, num_public_blocks)
        return Use(self._clock, tables, num_prompt_blocks, public)

    def _tables_of(self, owner: str | bytes | None, num_blocks: int) -> ReuseTables:
        """Return the tables of a tenant or a public namespace, and count a request of so many blocks in them."""
        # The latest owner is the last one.
        tables = self._tables.pop(owner, None) or ReuseTables()
        self._tables[owner] = tables
        if len(self._tables) > MAX_TENANTS:
            del self._tables[next(iter(self._tables))]
        tables.count_request(num_blocks)
        return tables

    def _take_over(self, sequence: Sequence, use: Use, index: int, block_ids: "array[int]") -> None:
        """Let a use be the last one of cached blocks, but of those that a later use has."""
        for start, end in self._runs(block_ids):
            segment = self._segment_of(block_ids[start])
            gap = use.clock - segment.use.clock
            if gap <= 0:
                continue
            run = block_ids[start:end]
            figures = segment.figures
            figures.events[bucket_of(gap)] += self.count(run)
            figures.unused[segment.bucket] -= len(run)
            segment.num_blocks -= len(run)
            segment.above = self._above(sequence, index + end, is_public=segment.public is not None)
            if not segment.num_blocks:
                self._end(segment)
            above = block_ids[start - 1] if start else sequence.block_table[index - 1] if index else -1
            self._extend(sequence, use, above, index + start, gap_class_of(gap), run)

    def _find_evicted(self, sequence: Sequence, use: Use, num_known: int, last: Use | None) -> tuple[int, Use | None]:
        """Find what follows a match and was evicted; return how many blocks are known, and who used the deepest."""
        num_public = self._num_public_blocks(sequence)
        while num_known < use.num_prompt_blocks:
            is_public = num_known < num_public
            (first,) = self._fingerprints(sequence, num_known, num_known + 1).tolist()
            segment = self._ghosts.take(self._above(sequence, num_known, is_public=is_public), first)
            if segment is None:
                break
            gap = use.clock - segment.use.clock
            if gap > MAX_GHOST_AGE:
                self._num_gone -= len(segment.gone)
                self._forget(segment)
                break
            # How far a prompt follows a longer public prefix than its own must teach nothing about that one.
            end = min(num_known + len(segment.gone), num_public if is_public else use.num_prompt_blocks)
            count = num_common(segment.gone, self._fingerprints(sequence, num_known, end))
            segment.figures.events[bucket_of(gap)] += count
            segment.figures.unused[segment.bucket] -= count
            self._num_gone -= count
            del segment.gone[-count:]
            num_known += count
            use.evicted.append((num_known, gap_class_of(gap)))
            if not is_public:
                last = segment.use
            segment.above = self._above(sequence, num_known, is_public=is_public)
            self._rest(segment)
        return num_known, last

    def _extend(
        self, sequence: Sequence, use: Use, above: int, index: int, gap_class: int, block_ids: "array[int]"
    ) -> None:
        """Let a use be the last one of blocks behind one that it has."""
        segment = self._segment_of(above) if above >= 0 else None
        is_public = index < self._num_public_blocks(sequence)
        public = use.public if is_public else None
        wanted = (use, public, gap_class, above)
        if segment is None or (segment.use, segment.public, segment.gap_class, segment.end) != wanted:
            segment = self._new_segment(use, gap_class, self._above(sequence, index, is_public=is_public), public)
        self._append(segment, block_ids)

    def _new_segment(self, use: Use, gap_class: int, above: bytes | None, public: ReuseTables | None) -> Segment:
        if not self._free_slots:
            self._free_slots.append(len(self._segments))
            self._segments.append(None)
        bucket = bucket_of(self._clock - use.clock)
        segment = Segment(use, gap_class, above, self._free_slots.pop(), bucket, public=public)
        self._segments[segment.slot] = segment
        self._segments_at[use.clock].append(segment)
        return segment

    def _append(self, segment: Segment, block_ids: "array[int]") -> None:
        if segment.gone:
            # Who had lost them has computed them again.
            self._forget_gone(segment)
        segment.num_blocks += len(block_ids)
        segment.end = block_ids[-1]
        segment.figures.unused[segment.bucket] += len(block_ids)
        view_of(self._slot_of)[indices_of(block_ids)] = segment.slot

    def _end(self, segment: Segment) -> None:
        """Let the slot of a segment without blocks go to another."""
        self._waiting.discard(segment)
        self._segments[segment.slot] = None
        self._free_slots.append(segment.slot)
        self._rest(segment)

    def _rest(self, segment: Segment) -> None:
        """Remember a segment without blocks for what was evicted of it, if anything was."""
        replaced = self._ghosts.add(segment) if segment.gone else segment
        if replaced is not None:
            self._num_gone -= len(replaced.gone)
            self._forget(replaced)
        self._limit_ghosts()

    def _remember(self, segment: Segment, token_ids: "array[int]") -> None:
        """Keep in mind what was evicted of a segment."""
        gone = self._fingerprinter.of(token_ids)[::-1]
        segment.gone.frombytes(gone.tobytes())
        self._num_gone += len(gone)
        self._limit_ghosts()
        if self._num_gone > MAX_GONE_BLOCKS:
            self._num_gone -= len(segment.gone)
            segment.gone = array("I")

    def _limit_ghosts(self) -> None:
        """Forget what was evicted longest ago, if it is too much."""
        while self._ghosts and (self._num_gone > MAX_GONE_BLOCKS or len(self._ghosts) > MAX_GHOSTS):
            oldest = self._ghosts.take_oldest()
            self._num_gone -= len(oldest.gone)
            self._forget(oldest)

    def _forget_gone(self, segment: Segment) -> None:
        """Let what was evicted of a segment be as if it had never been there."""
        self._ghosts.discard(segment)
        segment.figures.unused[segment.bucket] -= len(segment.gone)
        self._num_gone -= len(segment.gone)
        segment.gone = array("I")
        if not segment.num_blocks:
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Let a segment get no older. What was evicted of it counts as unused for as long as it was known."""
        segments = self._segments_at[segment.use.clock]
        segments.remove(segment)
        if not segments:
            del self._segments_at[segment.use.clock]

    def _offer(self, block_id: int) -> None:
        """Let the segment of a block wait for eviction, if it can go."""
        segment = self._segment_of(block_id)
        if segment.cell is None and self._can_go(segment):
            self._waiting.add(segment)

    def _can_go(self, segment: Segment) -> bool:
        return bool(self._is_unheld[segment.end]) and self._tree.is_end_of_leaf(segment.end)

    def _segments_of(self, use: Use) -> list[Segment]:
        return [segment for segment in self._segments_at.get(use.clock, ()) if segment.use is use]

    def _segment_of(self, block_id: int) -> Segment:
        segment = self._segments[self._slot_of[block_id]]
        assert segment is not None
        return segment

    def _runs(self, block_ids: "array[int]") -> Iterator[tuple[int, int]]:
        """Yield where the parts of block_ids begin and end that are of one segment each."""
        if len(block_ids) <= 1:
            return iter([(0, 1)] * len(block_ids))
        slots = view_of(self._slot_of)[indices_of(block_ids)]
        ends = [*(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(block_ids)]
        return zip([0, *ends[:-1]], ends, strict=True)

    def _fingerprints(self, sequence: Sequence, start: int, end: int) -> Fingerprints:
        block_size = self._tree.block_size
        return self._fingerprinter.of(sequence.token_ids[start * block_size : end * block_size])

    def _above(self, sequence: Sequence, index: int, *, is_public: bool) -> bytes:
        """Return what a block behind a sequence's first ones follows: its namespace, and the digest of the one above.

        is_public: whether it is of a public prefix, be it a longer one than the sequence's.
        """
        path = self._keys.path_of(sequence)
        return (path.public if is_public else path.own) + (self._keys.digest_of(sequence, index - 1) if index else b"")

    def _num_public_blocks(self, sequence: Sequence) -> int:
        return self._keys.path_of(sequence).num_public_blocks

    def _unheld_view(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._is_unheld, np.uint8)

"""Give up the block that is least likely to be used again soon, by what was learned of blocks like it."""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from radixserve.core.eviction.answer import Answer
from radixserve.core.eviction.gaps import answer_class_of, bucket_borders, bucket_of, gap_class_of
from radixserve.core.eviction.order import DigestOf, EvictionOrder
from radixserve.core.eviction.reuse_tables import Cell, ReuseTables
from radixserve.core.eviction.use import Segment, Use
from radixserve.core.radix_tree import RadixTree, Removal
from radixserve.core.sequence import Sequence

# How long, in requests, and of how many segments it is remembered that they were evicted.
MAX_GHOST_AGE = 2000
MAX_GHOSTS = 4096
# The share of a request's prompt that another must find to continue it.
CONTINUED_SHARE = 0.9
MIN_SWEPT_ENTRIES = 64

_BORDERS = bucket_borders()


class LearnedReuse(EvictionOrder):
    """The order of eviction that learns when blocks are used again."""

    def __init__(self, num_blocks: int, tree: RadixTree) -> None:
        self._tree = tree
        self._clock = 0
        self._is_unheld = bytearray(num_blocks)
        self._num_unheld = 0
        self._slot_of = array("i", [-1]) * num_blocks
        self._segments: list[Segment | None] = []
        self._free_slots: list[int] = []
        self._segments_at: defaultdict[int, list[Segment]] = defaultdict(list)
        self._tables: dict[str | None, ReuseTables] = {}
        self._ghosts: dict[bytes, Segment] = {}
        self._cells = _CellQueue()

    def __len__(self) -> int:
        return self._num_unheld

    def __contains__(self, block_id: int) -> bool:
        return bool(self._is_unheld[block_id])

    def __iter__(self) -> Iterator[int]:
        return (block_id for block_id, is_unheld in enumerate(self._is_unheld) if is_unheld)

    def count(self, block_ids: "array[int]") -> int:
        return int(np.count_nonzero(self._unheld_view()[_view(block_ids)]))

    def add(self, block_id: int) -> None:
        self._is_unheld[block_id] = 1
        self._num_unheld += 1
        self._offer(block_id)

    def add_all(self, block_ids: "array[int]") -> None:
        self._unheld_view()[_view(block_ids)] = 1
        self._num_unheld += len(block_ids)
        for start, _ in self._runs(block_ids):
            self._offer(block_ids[start])

    def discard(self, block_id: int) -> None:
        self._num_unheld -= self._is_unheld[block_id]
        self._is_unheld[block_id] = 0

    def discard_all(self, block_ids: "array[int]") -> None:
        self._num_unheld -= self.count(block_ids)
        self._unheld_view()[_view(block_ids)] = 0

    def first(self) -> tuple[int, int]:
        while True:
            cell = self._cells.least()
            segment = self._front(cell)
            if not self._cells.place(cell):
                continue
            if self._is_unheld[segment.end] and self._tree.is_end_of_leaf(segment.end):
                return segment.end, segment.num_blocks
            self._withdraw(segment)

    def begin(self, sequence: Sequence, block_ids: "array[int]", digest_of: DigestOf) -> None:
        use = sequence.use
        if use is not None:
            # It was interrupted. What it has lost it computes again, and that comes as new.
            for segment in self._segments_of(use):
                segment.figures.unused[segment.bucket] -= segment.num_gone
                segment.num_gone = 0
            self._take_over(use, -1, block_ids)
            return
        use = sequence.use = self._start(sequence)
        last = self._segment_of(block_ids[-1]) if block_ids else None
        num_gone = last.num_gone if last is not None and last.end == block_ids[-1] else 0
        self._take_over(use, -1, block_ids)
        num_known, last = self._find_evicted(use, len(block_ids), last, num_gone, digest_of)
        if last is not None and num_known >= CONTINUED_SHARE * last.use.num_prompt_blocks:
            use.gap_class = gap_class_of(use.clock - last.use.clock)
        if use.tables.is_time_to_learn:
            use.tables.learn()
            self._cells.sort(use.tables)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        use = parent.use
        if use is not None:
            child.use = Use(use.clock, use.tables, use.num_prompt_blocks, 0, use.gap_class, use.evicted)

    def reuse(self, sequence: Sequence, above: int, block_ids: "array[int]") -> None:
        self._take_over(self._use_of(sequence), above, block_ids)

    def enter(self, sequence: Sequence, above: int, index: int, block_ids: "array[int]") -> None:
        use, start = self._use_of(sequence), 0
        for end, gap_class in [*use.evicted, (index + len(block_ids), use.gap_class)]:
            run = block_ids[start : max(end - index, start)]
            if run:
                self._extend(use, block_ids[start - 1] if start else above, gap_class, run)
                start += len(run)

    def record_answer(self, sequence: Sequence, answer: Answer) -> None:
        use = sequence.use
        if use is None:
            return
        segments = self._segments_of(use)
        for segment in segments:
            segment.figures.unused[segment.bucket] -= segment.num_blocks + segment.num_gone
        use.answer_class = answer_class_of(answer)
        for segment in segments:
            segment.figures.unused[segment.bucket] += segment.num_blocks + segment.num_gone
            self._move(segment)

    def _use_of(self, sequence: Sequence) -> Use:
        if sequence.use is None:
            sequence.use = self._start(sequence)
        return sequence.use

    def _start(self, sequence: Sequence) -> Use:
        """Let a request start."""
        self._tick()
        request = sequence.request
        num_prompt_blocks = request.num_prompt_tokens // self._tree.block_size
        tables = self._tables.setdefault(request.tenant, ReuseTables())
        tables.count_request(num_prompt_blocks)
        return Use(self._clock, tables, num_prompt_blocks)

    def _segments_of(self, use: Use) -> list[Segment]:
        return [segment for segment in self._segments_at.get(use.clock, ()) if segment.use is use]

    def _take_over(self, use: Use, above: int, block_ids: "array[int]") -> None:
        """Let a use be the last one of cached blocks, but of those that a later use has."""
        for start, end in self._runs(block_ids):
            segment = self._segment_of(block_ids[start])
            gap = use.clock - segment.use.clock
            if gap <= 0:
                continue
            run = block_ids[start:end]
            num_unheld = self.count(run)
            if num_unheld:
                segment.figures.events[bucket_of(gap)] += num_unheld
            self._shrink(segment, len(run))
            self._extend(use, block_ids[start - 1] if start else above, gap_class_of(gap), run)

    def remove(self, removal: Removal, *, is_eviction: bool) -> None:
        block_ids = removal.block_ids
        segment = self._segment_of(block_ids[0])
        _fill(self._slot_of, block_ids, -1)
        segment.num_blocks -= len(block_ids)
        if is_eviction:
            segment.num_gone += len(block_ids)
        else:
            segment.figures.unused[segment.bucket] -= len(block_ids)
        segment.end = removal.end
        if not segment.num_blocks:
            self._free(segment)
            if segment.num_gone and removal.digest is not None:
                self._remember(removal.digest, segment)
            else:
                self._forget(segment)
        if removal.is_end_of_leaf:
            self._offer(removal.end)

    def _tick(self) -> None:
        """Let a request start: everything is older by one."""
        self._clock += 1
        for age, bucket in _BORDERS:
            for segment in self._segments_at.get(self._clock - age, ()):
                count = segment.num_blocks + segment.num_gone
                unused = segment.figures.unused
                unused[segment.bucket] -= count
                unused[bucket] += count
                segment.bucket = bucket
                self._move(segment)

    def _find_evicted(
        self, use: Use, num_known: int, last: Segment | None, num_gone: int, digest_of: DigestOf
    ) -> tuple[int, Segment | None]:
        """Find what follows a match and was evicted; return how many blocks are known, and who used the deepest."""
        while num_known < use.num_prompt_blocks:
            if num_gone:
                segment = last
            else:
                digest = digest_of(num_known)
                segment = self._ghosts.pop(digest, None) if digest is not None else None
                if segment is None:
                    break
                self._forget(segment)
                if use.clock - segment.use.clock > MAX_GHOST_AGE:
                    break
                num_gone = segment.num_gone
            assert segment is not None
            gap = use.clock - segment.use.clock
            count = min(num_gone, use.num_prompt_blocks - num_known)
            segment.figures.events[bucket_of(gap)] += count
            segment.figures.unused[segment.bucket] -= count
            num_known += count
            use.evicted.append((num_known, gap_class_of(gap)))
            last, num_gone = segment, 0
        return num_known, last

    def _remember(self, digest: bytes, segment: Segment) -> None:
        """Keep a segment of which all was evicted in mind for a while."""
        before = self._ghosts.pop(digest, None)
        if before is not None:
            self._forget(before)
        self._ghosts[digest] = segment
        if len(self._ghosts) > MAX_GHOSTS:
            self._forget(self._ghosts.pop(next(iter(self._ghosts))))

    def _extend(self, use: Use, above: int, gap_class: int, block_ids: "array[int]") -> None:
        """Let a use be the last one of blocks behind one that it has."""
        segment = self._segment_of(above) if above >= 0 else None
        if segment is None or segment.use is not use or segment.gap_class != gap_class or segment.end != above:
            segment = Segment(use, gap_class, self._new_slot(), bucket_of(self._clock - use.clock))
            self._segments[segment.slot] = segment
            self._segments_at[use.clock].append(segment)
        segment.num_blocks += len(block_ids)
        segment.end = block_ids[-1]
        segment.figures.unused[segment.bucket] += len(block_ids)
        _fill(self._slot_of, block_ids, segment.slot)

    def _shrink(self, segment: Segment, num_blocks: int) -> None:
        """Take the uppermost blocks away from a segment."""
        segment.num_blocks -= num_blocks
        segment.figures.unused[segment.bucket] -= num_blocks
        if not segment.num_blocks:
            self._free(segment)
            self._forget(segment)

    def _free(self, segment: Segment) -> None:
        """Let the slot of a segment without blocks go to another."""
        self._withdraw(segment)
        self._segments[segment.slot] = None
        self._free_slots.append(segment.slot)

    def _forget(self, segment: Segment) -> None:
        """Let a segment get no older. The blocks that it has lost count as unused for as long as they were known."""
        segments = self._segments_at[segment.use.clock]
        segments.remove(segment)
        if not segments:
            del self._segments_at[segment.use.clock]

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._segments.append(None)
        return len(self._segments) - 1

    def _offer(self, block_id: int) -> None:
        """Let the segment of a block wait for eviction, if the block is its end, unheld and the end of a leaf."""
        segment = self._segment_of(block_id)
        end = segment.end
        if segment.cell is None and self._is_unheld[end] and self._tree.is_end_of_leaf(end):
            self._wait(segment)

    def _wait(self, segment: Segment) -> None:
        figures, bucket = segment.figures, segment.bucket
        cell = figures.cells.get(bucket)
        if cell is None:
            cell = figures.cells[bucket] = Cell(figures.scores[bucket])
        segment.cell = cell
        cell.num_waiting += 1
        heappush(cell.waiting, (segment.use.clock, segment.slot))
        self._cells.place(cell)

    def _withdraw(self, segment: Segment) -> None:
        if segment.cell is not None:
            segment.cell.num_waiting -= 1
            segment.cell = None

    def _move(self, segment: Segment) -> None:
        if segment.cell is not None:
            self._withdraw(segment)
            self._wait(segment)

    def _front(self, cell: Cell) -> Segment:
        """Return the segment of a cell, which is not empty, that was used longest ago."""
        while True:
            clock, slot = cell.waiting[0]
            segment = self._segments[slot]
            if segment is not None and segment.cell is cell and segment.use.clock == clock:
                return segment
            heappop(cell.waiting)

    def _segment_of(self, block_id: int) -> Segment:
        segment = self._segments[self._slot_of[block_id]]
        assert segment is not None
        return segment

    def _runs(self, block_ids: "array[int]") -> Iterator[tuple[int, int]]:
        """Yield where the parts of block_ids begin and end that are of one segment each."""
        if len(block_ids) <= 1:
            return iter([(0, 1)] if block_ids else [])
        slots = _view(self._slot_of)[_view(block_ids)]
        ends = [*(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(block_ids)]
        return zip([0, *ends[:-1]], ends, strict=True)

    def _unheld_view(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._is_unheld, np.uint8)


class _CellQueue:
    """The cells in which segments wait, the one of least score first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Cell]] = []
        self._num_placed = 0

    def place(self, cell: Cell) -> bool:
        """Put a cell where its score and its front say, and return whether it was there already."""
        clock, _ = cell.waiting[0]
        if cell.place is not None and (cell.score, clock) == cell.place[:2]:
            return True
        self._num_placed += 1
        cell.place = (cell.score, clock, self._num_placed)
        heappush(self._heap, (cell.place, cell))
        return False

    def sort(self, tables: ReuseTables) -> None:
        for figures in tables.classes.values():
            for cell in figures.cells.values():
                if cell.num_waiting:
                    self.place(cell)

    def least(self) -> Cell:
        while True:
            place, cell = self._heap[0]
            if place is not cell.place:
                heappop(self._heap)
            elif not cell.num_waiting:
                heappop(self._heap)
                cell.place = None
                cell.waiting.clear()
            else:
                return cell


def _fill(of_block: "array[int]", block_ids: "array[int]", value: int) -> None:
    _view(of_block)[_view(block_ids)] = value


def _view(block_ids: "array[int]") -> npt.NDArray[np.int32]:
    return np.frombuffer(block_ids, np.int32)

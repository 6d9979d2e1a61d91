"""The segments that wait for eviction, and which of them goes first."""

from collections.abc import Sequence
from heapq import heappop, heappush

from radixserve.core.eviction.cells import MIN_SWEPT_ENTRIES, Cell, CellOrder
from radixserve.core.eviction.reuse_tables import ReuseTables
from radixserve.core.eviction.use import Segment


class WaitingSegments:
    """A queue for each class and each bucket of age, the cells, and the order of these.

    segments: all there are by their slots, which the caller changes. A cell holds clocks and slots, and an entry counts
    while its slot has a segment of that clock that says that it waits there.
    """

    def __init__(self, segments: Sequence[Segment | None]) -> None:
        self._segments = segments
        self._cells = CellOrder()

    def add(self, segment: Segment) -> None:
        """Let a segment wait, which does not yet, in the cell of its class and its age."""
        cell = segment.figures.cell_of(segment.bucket)
        segment.cell = cell
        cell.num_waiting += 1
        heappush(cell.waiting, (segment.use.clock, segment.slot))
        if len(cell.waiting) > 2 * cell.num_waiting + MIN_SWEPT_ENTRIES:
            # Sorted is a heap, too.
            cell.waiting = sorted({entry for entry in cell.waiting if self._segment_of(cell, entry) is not None})
        self._cells.place(cell)

    def discard(self, segment: Segment) -> None:
        """Let a segment wait no longer, if it does."""
        if segment.cell is not None:
            segment.cell.num_waiting -= 1
            segment.cell = None

    def move(self, segment: Segment) -> None:
        """Let a segment that waits do so where it belongs now."""
        if segment.cell is not None:
            self.discard(segment)
            self.add(segment)

    def take_in(self, tables: ReuseTables) -> None:
        """Put the cells of tables where their scores, which have changed, say."""
        for cell in tables.cells():
            self._cells.place(cell)

    def first(self) -> Segment:
        """Return the segment of least score, of equal ones the one used longest ago. There must be one."""
        while True:
            cell = self._cells.least()
            while (segment := self._segment_of(cell, cell.waiting[0])) is None:
                heappop(cell.waiting)
            if self._cells.place(cell):
                return segment

    def _segment_of(self, cell: Cell, entry: tuple[int, int]) -> Segment | None:
        """Return the segment of an entry, if it still waits in the cell."""
        clock, slot = entry
        segment = self._segments[slot]
        return segment if segment is not None and segment.cell is cell and segment.use.clock == clock else None

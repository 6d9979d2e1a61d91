"""Which of the segments that can be evicted goes first."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

# Below this length entries that no longer count are not worth a sweep.
MIN_SWEPT_ENTRIES = 64


@dataclass(slots=True, eq=False)
class Cell:
    """The segments of one class and one bucket of age that can be evicted; all have the same score.

    waiting: clock and slot of each, as a heap; some have left since. num_waiting: those that have not.
    place: score and front by which the cell stands in the order of cells, and a number; None if it does not.
    """

    score: float
    waiting: list[tuple[int, int]] = field(default_factory=list)
    num_waiting: int = 0
    place: tuple[float, int, int] | None = None

    def clear(self) -> None:
        """Give up the place of a cell that is empty."""
        self.place = None
        self.waiting.clear()


class CellOrder:
    """The cells that are not empty, the least score first, and of equal ones the one with the oldest front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Cell]] = []
        self._max_entries = MIN_SWEPT_ENTRIES
        self._num_placed = 0

    def place(self, cell: Cell) -> bool:
        """Put a cell where its score and its front say, and return whether it was there already."""
        clock, _ = cell.waiting[0]
        if cell.place is not None and (cell.score, clock) == cell.place[:2]:
            return True
        self._num_placed += 1
        cell.place = (cell.score, clock, self._num_placed)
        heappush(self._heap, (cell.place, cell))
        if len(self._heap) > self._max_entries:
            self._sweep()
        return False

    def least(self) -> Cell:
        """Return the first cell. There must be one."""
        while True:
            place, cell = self._heap[0]
            if place is cell.place and cell.num_waiting:
                return cell
            heappop(self._heap)
            if place is cell.place:
                cell.clear()

    def _sweep(self) -> None:
        """Drop the entries of cells that are empty or have another place now."""
        for place, cell in self._heap:
            if place is cell.place and not cell.num_waiting:
                cell.clear()
        self._heap = [(place, cell) for place, cell in self._heap if place is cell.place]
        heapify(self._heap)
        self._max_entries = 2 * len(self._heap) + MIN_SWEPT_ENTRIES

"""What is known of when blocks are used again: hazards, learned as it goes, and the worth of keeping a block.

Gaps are counted in requests and sorted into buckets. The hazard of a bucket is the share of the blocks that reached
it which were used again in it (Kaplan and Meier 1958): those evicted or not used again until now count as long as
they are known of. The score is a Gittins index: the most uses again per request of waiting that a block has to offer,
over all times at which one might stop to wait for it (Gittins 1979).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixserve.core.eviction.cells import Cell
from radixserve.core.eviction.gaps import BUCKET_STARTS, NUM_BUCKETS, NUM_GAP_CLASSES, UNKNOWN_ANSWER, kind_of

Table = npt.NDArray[np.float64]

# The hazard of a bucket before anything is known, and how many requests' worth of blocks it takes to outweigh that of
# the next wider group of classes.
PRIOR_HAZARD = 0.19
PRIOR_WEIGHT = 40.0
NUM_SMOOTHINGS = 8
LEARNING_INTERVAL = 16

_WIDTHS = np.diff(BUCKET_STARTS)


@dataclass(slots=True, eq=False)
class ClassFigures:
    """What is known of one class of uses, for each bucket of gaps.

    events: blocks used again. unused: blocks not used again, by their age. scores: what a block of that age is worth.
    """

    scores: list[float]
    events: Table = field(default_factory=lambda: np.zeros(NUM_BUCKETS))
    unused: Table = field(default_factory=lambda: np.zeros(NUM_BUCKETS))
    cells: dict[int, Cell] = field(default_factory=dict)

    def cell_of(self, bucket: int) -> Cell:
        """Return the cell of a bucket of ages."""
        cell = self.cells.get(bucket)
        if cell is None:
            cell = self.cells[bucket] = Cell(self.scores[bucket])
        return cell


def scores_of(hazards: Table) -> Table:
    """Return the Gittins index at the start of each bucket, for each row of hazards. [num_rows, NUM_BUCKETS]"""
    num_rows = len(hazards)
    waits = _WIDTHS * (1 - hazards[:, :-1] / 2)
    shape = (num_rows, NUM_BUCKETS - 1)
    survival, used, waited, best = np.ones(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for num_ahead in range(NUM_BUCKETS - 1):
        # Column b stands for a block in bucket b now; those whose walk would leave the table have ended.
        n = NUM_BUCKETS - 1 - num_ahead
        reached = survival[:, :n]
        used[:, :n] += reached * hazards[:, num_ahead : num_ahead + n]
        waited[:, :n] += reached * waits[:, num_ahead:]
        np.maximum(best[:, :n], used[:, :n] / waited[:, :n], out=best[:, :n])
        survival[:, :n] *= 1 - hazards[:, num_ahead : num_ahead + n]
        if np.all((used + survival <= best * waited)[:, : n - 1]):
            # Not even if all that is left were used again at once would it be better to wait on.
            break
    return np.hstack([best, np.zeros((num_rows, 1))])


_PRIOR = np.full((1, NUM_BUCKETS), PRIOR_HAZARD)
_PRIOR_SCORES: list[float] = scores_of(_PRIOR)[0].tolist()


class ReuseTables:
    """The figures of one tenant's uses, by class: the kind and the length of the answer, and the gap before the use."""

    def __init__(self) -> None:
        self.classes: dict[int, ClassFigures] = {}
        self._num_requests = 0
        self._num_blocks = 0
        self._scores_by_gap: dict[int, list[float]] = {}

    def figures_of(self, answer_class: int, gap_class: int) -> ClassFigures:
        """Return what is known of a class of uses."""
        number = answer_class * NUM_GAP_CLASSES + gap_class
        figures = self.classes.get(number)
        if figures is None:
            figures = self.classes[number] = ClassFigures(self._scores_by_gap.get(gap_class, _PRIOR_SCORES))
        return figures

    def cells(self) -> Iterator[Cell]:
        """Yield all cells that are not empty."""
        for figures in self.classes.values():
            yield from (cell for cell in figures.cells.values() if cell.num_waiting)

    @property
    def is_time_to_learn(self) -> bool:
        """Whether enough has come since the last time, which is a few requests at first."""
        n = self._num_requests
        return bool(self.classes) and (n % LEARNING_INTERVAL == 0 or (n < LEARNING_INTERVAL and n & (n - 1) == 0))

    def count_request(self, num_blocks: int) -> None:
        """Count a request with its blocks."""
        self._num_requests += 1
        self._num_blocks += num_blocks

    def learn(self) -> None:
        """Compute all scores anew, also in the cells."""
        numbers = list(self.classes)
        events = np.array([figures.events for figures in self.classes.values()])
        unused = np.array([figures.unused for figures in self.classes.values()])
        weight = max(PRIOR_WEIGHT * self._num_blocks / self._num_requests, 1.0)
        gap_classes = [number % NUM_GAP_CLASSES for number in numbers]
        answers = [number // NUM_GAP_CLASSES for number in numbers]
        kinds = [kind_of(answer) for answer in answers]
        everything = _hazards(events, unused, [0] * len(numbers), _PRIOR, weight)
        hazards = everything
        for groups in (kinds, answers, numbers):
            hazards = _hazards(events, unused, groups, hazards, weight)
        by_gap = _hazards(events, unused, gap_classes, everything, weight)
        scores = scores_of(_smoothed(hazards)).tolist()
        scores_by_gap = scores_of(_smoothed(by_gap)).tolist()
        self._scores_by_gap = dict(zip(gap_classes, scores_by_gap, strict=True))
        for index, figures in enumerate(self.classes.values()):
            # How an answer ends that is not known yet, or never will be, has nothing to tell.
            figures.scores = scores_by_gap[index] if answers[index] == UNKNOWN_ANSWER else scores[index]
            for bucket, cell in figures.cells.items():
                cell.score = figures.scores[bucket]


def _hazards(events: Table, unused: Table, groups: Sequence[Hashable], wider: Table, weight: float) -> Table:
    """Return for each class the hazards of its group of classes, drawn to those of the wider group. [C, NUM_BUCKETS]

    events, unused, wider: [C, NUM_BUCKETS]. groups: to which group each class belongs.
    """
    order = list(dict.fromkeys(groups))
    index = np.array([order.index(group) for group in groups], np.intp)
    events_of = np.zeros((len(order), NUM_BUCKETS))
    unused_of = np.zeros((len(order), NUM_BUCKETS))
    np.add.at(events_of, index, events)
    np.add.at(unused_of, index, unused)
    at_risk = _sums_from(events_of) + _sums_from(unused_of) - unused_of / 2
    wider_of = np.broadcast_to(wider, events.shape)[[groups.index(group) for group in order]]
    hazards: Table = ((events_of + weight * wider_of) / (at_risk + weight))[index]
    return hazards


def _sums_from(table: Table) -> Table:
    """Return for each bucket the sum over it and all later ones."""
    return np.cumsum(table[:, ::-1], axis=1)[:, ::-1]


def _smoothed(hazards: Table) -> Table:
    for _ in range(NUM_SMOOTHINGS):
        inner = hazards[:, :-2] / 4 + hazards[:, 1:-1] / 2 + hazards[:, 2:] / 4
        hazards = np.hstack([hazards[:, :1], inner, hazards[:, -1:]])
    return hazards

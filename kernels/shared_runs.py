"""Runs of blocks that several rows of a step share, found in their block tables."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, frozen=True)
class SharedRun:
    """Positions begin to end, which have the same blocks in all of rows.

    parent: the run, by its place among all runs, in which the rows share the positions before begin, with others; -1 if
    begin is 0.
    """

    rows: NDArray[np.int64]
    begin: int
    end: int
    parent: int


def find_shared_runs(
    block_tables: NDArray[np.int64],
    num_before: NDArray[np.int64],
    *,
    block_size: int,
    multiple_of: int,
    end_worth_sharing: Callable[[int, int, int], int],
) -> list[SharedRun]:
    """Return the forest of runs that rows share from their beginning, parents before children.

    block_tables: [R, max_blocks]; equal ids mean equal keys and values. num_before: [R], tokens before a row's first
    query, to which all of its queries attend. A run ends at a multiple of multiple_of tokens.
    end_worth_sharing: takes a number of rows, and begin and end of what they share; returns which end pays, begin if
    none does. What lies behind it may still be shared by fewer of the rows.
    """
    width = -(-int(num_before.max(initial=0)) // block_size)
    if len(num_before) < 2 or width == 0:
        return []
    # In the order of their tables' bytes, rows that share a run are neighbours, and share what all pairs of neighbours
    # between them do: the runs are the intervals of an array of common prefixes (Abouelhoda et al. 2004).
    tables = np.ascontiguousarray(block_tables[:, :width])
    order = tables.view(f"V{tables.itemsize * width}").ravel().argsort()
    ordered, limits = tables[order], num_before[order]
    differs = ordered[1:] != ordered[:-1]
    num_common = np.where(differs.any(axis=1), differs.argmax(axis=1), width) * block_size
    common = (np.minimum(num_common, np.minimum(limits[1:], limits[:-1])) // multiple_of * multiple_of).tolist()

    runs: list[SharedRun] = []
    left = [(0, len(order), 0, -1)]
    while left:
        first, last, begin, parent = left.pop()
        end = min(common[first : last - 1])
        worth = end_worth_sharing(last - first, begin, end) if end > begin else begin
        if worth > begin:
            runs.append(SharedRun(order[first:last], begin, worth, parent))
            begin, parent = worth, len(runs) - 1
        start = first
        for index in range(first, last):
            if index == last - 1 or common[index] == end:
                if index > start:
                    left.append((start, index + 1, begin, parent))
                start = index + 1
    return runs

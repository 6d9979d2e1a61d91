"""Cut the attention of a step into tasks: tiles of tokens, splits of their contexts, and runs that tiles share."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixserve.kernels.shared_runs import SharedRun, find_shared_runs

# Query vectors, of all heads that share a K/V head, that read a chunk of keys once it is unpacked: about six times what
# unpacking costs is then done with it, and queries, sums and chunk stay in the second-level cache.
TILE_QUERIES = 96
# Keys that one task reads for a row of one token: so that two threads share a single row, and merging costs little.
_DECODE_SPLIT = 512
# The same for a few tokens on a long context. A row of more tiles than this has tasks enough without splits, and would
# need much memory for them.
_PREFILL_SPLIT = 2048
_MAX_SPLIT_TILES = 2
_WHOLE = 2**62
# kChunk of attention.h: a task of several tiles has whole chunks, so that each chunk of a split is one task's.
_CHUNK = 64
# Queries of one token each that read a shared chunk together. From about so many on, reading it hides behind computing,
# and several tasks keep all threads busy where there are few K/V heads and splits.
_SHARED_QUERIES = 24
# A run that ends inside a split adds a task for each of its rows, which takes 0.37 us, as long as reading 220 float16
# keys and values of 64 elements from the second-level cache (1.7 ns each). The rest is for threads that wait for others
# between the run and what follows it: with less, two threads lost up to 10 % on some steps.
_KEYS_OF_A_TASK = 350


@dataclass(slots=True, frozen=True)
class AttentionTasks:
    """What C++ works through, fields of its structs in their order. See attention.h.

    tiles: [num_tiles, 7]; workspace is a tile's number of queries there, of partial_size, until it is laid out.
    tasks: [num_tasks, 5], a phase after another, in each the longest first so that threads end together.
    members: tiles by their places. phase_ends: [num_phases].
    """

    tiles: NDArray[np.int64]
    tasks: NDArray[np.int64]
    members: NDArray[np.int64]
    phase_ends: NDArray[np.int64]


def cut_into_tiles(
    queries: NDArray[np.int64], contexts: NDArray[np.int64], *, tokens_per_tile: int
) -> NDArray[np.int64]:
    """Return [num_tiles, 7], the fields of Tile in attention.h; the last one is still to be filled in."""
    num_tiles = -(-queries // tokens_per_tile)
    rows = np.repeat(np.arange(len(queries)), num_tiles)
    skipped = _ranks(num_tiles) * tokens_per_tile  # tokens of the row before the tile
    tiles = np.zeros((len(rows), 7), np.int64)
    tiles[:, 0] = rows
    tiles[:, 1] = (queries.cumsum() - queries)[rows] + skipped
    tiles[:, 2] = np.minimum(queries[rows] - skipped, tokens_per_tile)
    tiles[:, 3] = (contexts - queries)[rows] + skipped + 1
    split = np.where(num_tiles > _MAX_SPLIT_TILES, _WHOLE, _PREFILL_SPLIT)
    tiles[:, 4] = np.where(queries == 1, _DECODE_SPLIT, split)[rows]
    visible_to_last = tiles[:, 3] + tiles[:, 2] - 1
    tiles[:, 5] = np.maximum(1, -(-visible_to_last // tiles[:, 4]))
    return tiles


def find_runs_of_tiles(
    tiles: NDArray[np.int64], block_tables: NDArray[np.int64], *, block_size: int, group_size: int
) -> list[SharedRun]:
    """Return the runs that tiles share, whose rows are tiles: those of one token among each other, and short ones.

    A tile of more than half of TILE_QUERIES reads for so many queries that sharing would save it little.
    """
    splits, num_queries = tiles[:, 4], tiles[:, 2] * group_size
    is_short = (splits == _PREFILL_SPLIT) & (tiles[:, 2] > 1) & (num_queries * 2 <= TILE_QUERIES)
    runs: list[SharedRun] = []
    for kind in (splits == _DECODE_SPLIT, is_short):
        places = np.flatnonzero(kind)
        if len(places) < 2:
            continue
        found = find_shared_runs(
            block_tables[tiles[places, 0]],
            tiles[places, 3] - 1,
            block_size=block_size,
            multiple_of=_CHUNK,
            end_worth_sharing=functools.partial(_end_worth_sharing, int(splits[places[0]])),
        )
        before = len(runs)
        runs += (
            SharedRun(places[run.rows], run.begin, run.end, run.parent + before if run.begin else -1) for run in found
        )
    return runs


def _end_worth_sharing(split_tokens: int, num_rows: int, begin: int, end: int) -> int:
    """Return end, or the border of splits before it if the rows read what lies behind that as fast by themselves."""
    border = max(begin, end // split_tokens * split_tokens)
    saved = (end - border) * (num_rows - 1)
    return end if saved >= _KEYS_OF_A_TASK * num_rows else border


def cut_into_tasks(
    tiles: NDArray[np.int64], runs: list[SharedRun], *, num_kv_heads: int, group_size: int
) -> AttentionTasks:
    """Cut tiles into tasks: the splits of the runs that they share, and of what each one has left."""
    num_shared, own_phase = np.zeros((2, len(tiles)), np.int64)
    members = [np.arange(len(tiles))]
    num_members = len(tiles)
    lines: list[tuple[int, int, int, int, int, int]] = []
    last_phases: list[int] = []
    for run in runs:
        split, num_rows = int(tiles[run.rows[0], 4]), len(run.rows)
        counts = np.concatenate(([0], tiles[run.rows, 2].cumsum())).tolist()  # tokens of the first 0, 1, ... rows
        limit = _SHARED_QUERIES if split == _DECODE_SPLIT else TILE_QUERIES
        if run.end <= run.begin // split * split + split:
            limit //= 2  # what comes after it waits for all of its phase, which may be this run alone
        num_sets = min(-(-counts[-1] * group_size // limit), num_rows // 2)
        cuts = [num_rows * cut // num_sets for cut in range(num_sets + 1)]
        sets = [(first, last - first, counts[last] - counts[first]) for first, last in itertools.pairwise(cuts)]
        # A task that goes on inside a split comes after the one that began it.
        phase = last_phases[run.parent] + 1 if run.begin % split else 0
        begin, last_phase = run.begin, phase
        while begin < run.end:
            end = min(run.end, begin // split * split + split)
            for first, count, num_tokens in sets:
                lines.append((phase, begin, end, num_members + first, count, num_tokens * (end - begin)))
            begin, last_phase, phase = end, phase, 0
        last_phases.append(last_phase)
        members.append(run.rows)
        num_members += num_rows
        num_shared[run.rows] = run.end
        own_phase[run.rows] = last_phase + 1 if run.end % split else 0
    tasks = _own_tasks(tiles, num_shared, own_phase)
    if lines:
        tasks = np.concatenate((lines, tasks))
    # Work is far below 2 ** 40.
    tasks = tasks[((tasks[:, 0] << 40) - tasks[:, 5]).argsort(kind="stable")]
    phase_ends = np.bincount(tasks[:, 0]).cumsum() * num_kv_heads
    fields = np.empty((len(tasks), num_kv_heads, 5), np.int64)
    fields[:, :, 0] = np.arange(num_kv_heads)
    fields[:, :, 1:] = tasks[:, None, 1:5]
    num_queries = tiles[:, 5] * tiles[:, 2] * group_size * num_kv_heads
    tiles[:, 6] = np.where((tiles[:, 5] > 1) | (num_shared > 0), num_queries, 0)
    return AttentionTasks(tiles, fields.reshape(-1, 5), np.concatenate(members), phase_ends)


def _own_tasks(
    tiles: NDArray[np.int64], num_shared: NDArray[np.int64], own_phase: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return [n, 6], phase, begin, end, first member, number of members and work of what tiles do not share."""
    first_split = num_shared // tiles[:, 4]
    counts = tiles[:, 5] - first_split
    places = np.repeat(np.arange(len(tiles)), counts)
    ranks = _ranks(counts)
    own = tiles[places]
    num_tokens, split_tokens = own[:, 2], own[:, 4]
    border = (first_split[places] + ranks) * split_tokens
    tasks = np.empty((len(places), 6), np.int64)
    tasks[:, 0] = np.where(ranks == 0, own_phase[places], 0)
    begin = np.maximum(border, num_shared[places], out=tasks[:, 1])
    end = np.minimum(border + split_tokens, own[:, 3] + num_tokens - 1, out=tasks[:, 2])
    tasks[:, 3] = places
    tasks[:, 4] = 1
    tasks[:, 5] = num_tokens * (end - begin)
    return tasks


def _ranks(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, ... for each of the counts, one after another."""
    ends = counts.cumsum()
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)

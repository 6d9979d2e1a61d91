"""Blocks that rows share are read once for them, and no number changes for it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.kernels.cpu.attention_tasks import cut_into_tasks, cut_into_tiles, find_runs_of_tiles
from tests.kernels.cpu.test_paged_attention import assert_threads_change_no_bit, attend, only, plan_rows, shapes
from tests.kernels.interpreted.paged_rows import PagedRows, Shape
from tests.kernels.shared_rows import Sharing, make_shared_rows

# Each step's rows (query length, context length), and what they share. A split is 512 keys for rows of one token and
# 2048 for others, a chunk 64.
Step = tuple[list[tuple[int, int]], list[Sharing]]
STEPS: dict[str, Step] = {
    "one prompt, its last token alone": ([(1, 513)] * 4, [Sharing(range(4), 512)]),
    "a run that ends inside a chunk": ([(1, 1000), (1, 977), (1, 978), (1, 1100)] * 2, [Sharing(range(8), 976)]),
    "a run that ends inside a split": ([(1, 700 + row) for row in range(9)], [Sharing(range(9), 448)]),
    "two prompts": (
        [(1, 530), (1, 600), (1, 530), (1, 700), (1, 20)],
        [Sharing([0, 2], 512), Sharing([1, 3], 528)],
    ),
    "conversations under one prompt, forked twice": (
        [(1, 1500), (1, 1400), (1, 1300), (1, 1340), (1, 900), (1, 620)],
        [Sharing([0, 1], 1296), Sharing([0, 1, 2, 3], 832), Sharing([4, 5], 608), Sharing(range(6), 256)],
    ),
    "forks inside two splits": (
        [(1, 1700)] * 12,
        [Sharing(range(6), 1536), Sharing(range(8), 960), Sharing(range(12), 384)],
    ),
    "a fork behind each split": (
        [(1, 1700)] * 6,
        [Sharing([0, 1], 1600), Sharing([0, 1, 2], 1088), Sharing([0, 1, 2, 3], 1040), Sharing(range(6), 528)],
    ),
    "short prompts on one history": (
        [(5, 2500), (2, 2400), (16, 2410), (3, 2350)],
        [Sharing([0, 1], 2384), Sharing(range(4), 2320)],
    ),
    "decodes beside prompts, short and long": (
        [(1, 700), (9, 700), (1, 800), (2, 690), (40, 700), (130, 800), (1, 577), (33, 640)],
        [Sharing(range(8), 576)],
    ),
}


def attend_shared(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(rows, block_size=rows.shape.block_size)


def keys_read(rows: PagedRows, *, block_size: int | None) -> int:
    """Return how many keys all tasks of a plan read."""
    return plan_rows(rows, block_size).num_keys_read


@pytest.mark.parametrize("step", STEPS)
def test_a_tile_reads_every_key_once_and_after_those_before_it_in_the_split(step: str) -> None:
    rows = make_shared_rows(Shape(3, 64, torch.float32, num_kv_heads=1), *STEPS[step])
    tiles = cut_into_tiles(np.array(rows.query_lengths), np.array(rows.context_lengths), tokens_per_tile=32)
    runs = find_runs_of_tiles(tiles, rows.block_tables.numpy(), block_size=16, group_size=3)
    cut = cut_into_tasks(tiles, runs, num_kv_heads=1, group_size=3)
    read: dict[tuple[int, int], int] = {}  # up to which key, of each split of a tile
    for first, end in itertools.pairwise([0, *cut.phase_ends.tolist()]):
        before = dict(read)
        for _, begin_key, end_key, first_member, num_members in cut.tasks[first:end].tolist():
            for tile in cut.members[first_member : first_member + num_members].tolist():
                split = begin_key // int(tiles[tile, 4])
                assert before.get((tile, split), split * int(tiles[tile, 4])) == begin_key
                assert read.get((tile, split)) == before.get((tile, split))
                read[tile, split] = end_key
    for tile, (_, _, num_tokens, num_visible, split_tokens, num_splits, _) in enumerate(tiles.tolist()):
        ends = [read[tile, split] for split in range(num_splits)]
        assert ends == [min(split_tokens * (split + 1), num_visible + num_tokens - 1) for split in range(num_splits)]
    assert len(read) == tiles[:, 5].sum()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", shapes())
def test_sharing_changes_no_bit(shape: Shape, step: str) -> None:
    rows = make_shared_rows(shape, *STEPS[step])
    output, log_sums = attend_shared(rows)
    plain, plain_sums = attend(rows)
    assert keys_read(rows, block_size=shape.block_size) < keys_read(rows, block_size=None)
    assert torch.equal(output, plain)
    assert torch.equal(log_sums, plain_sums)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
def test_attention_over_shared_blocks_equals_the_reference(group_size: int, step: str) -> None:
    rows = make_shared_rows(Shape(group_size, 24, torch.float32, num_kv_heads=1), *STEPS[step])
    output, log_sums = attend_shared(rows)
    expected, expected_sums = rows.expected()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(log_sums, expected_sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_a_row_gets_the_same_bits_alone_as_under_a_shared_run(step: str) -> None:
    rows = make_shared_rows(Shape(3, 64, torch.float16), *STEPS[step])
    output, log_sums = attend_shared(rows)
    for row, (start, length) in enumerate(zip(rows.starts, rows.query_lengths, strict=True)):
        alone, sums_alone = attend_shared(only(rows, row))
        assert torch.equal(output[start : start + length], alone)
        assert torch.equal(log_sums[start : start + length], sums_alone)


@pytest.mark.usefixtures("keeps_threads")
def test_the_number_of_threads_changes_no_bit_of_shared_runs() -> None:
    rows = make_shared_rows(Shape(3, 64, torch.float16), *STEPS["decodes beside prompts, short and long"])
    assert_threads_change_no_bit(rows, rows.shape.block_size)


def test_a_nan_of_one_rows_own_stays_there_and_a_shared_one_reaches_all_that_share_it() -> None:
    steps, sharings = STEPS["a run that ends inside a split"]
    for block_index, reached in ((-1, [4]), (0, range(9))):
        rows = make_shared_rows(Shape(3, 64, torch.float32), steps, sharings)
        rows.value_cache[rows.blocks_of(4)[block_index], :, 0] = torch.nan
        is_bad = attend_shared(rows)[0].isnan().flatten(1)
        assert is_bad.all(1).nonzero().flatten().tolist() == list(reached)
        assert is_bad.any(1).nonzero().flatten().tolist() == list(reached)


@pytest.mark.parametrize(
    ("rows", "sharings"),
    [
        ([(1, 2000)], []),
        ([(1, 700), (1, 800), (6, 300)], []),
        # So little that the tasks which it would add take longer.
        ([(1, 400)] * 4, [Sharing(range(4), 64)]),
        # One of one token and one of more sum in orders of their own.
        ([(1, 700), (3, 700)], [Sharing(range(2), 688)]),
    ],
)
def test_a_step_without_a_run_worth_sharing_is_planned_as_if_nothing_was_shared(
    rows: list[tuple[int, int]], sharings: Sequence[Sharing]
) -> None:
    made = make_shared_rows(Shape(3, 64, torch.float32), rows, sharings)
    assert keys_read(made, block_size=16) == keys_read(made, block_size=None)


def test_a_run_is_read_once_for_few_rows_and_by_sets_for_many() -> None:
    for num_rows, num_sets in ((2, 1), (8, 1), (16, 2), (64, 8)):
        rows = make_shared_rows(Shape(3, 64, torch.float32), [(1, 1025)] * num_rows, [Sharing(range(num_rows), 1024)])
        assert keys_read(rows, block_size=16) == 2 * (1024 * num_sets + num_rows)


def test_blocks_of_any_size_are_shared() -> None:
    for block_size in (1, 4, 64, 256, 512):
        shape = Shape(3, 64, torch.float32, block_size)
        rows = make_shared_rows(shape, [(1, 1100), (1, 1030)], [Sharing(range(2), 1024)])
        assert keys_read(rows, block_size=block_size) == 2 * (1024 + 76 + 6)
        assert torch.equal(attend_shared(rows)[0], attend(rows)[0])


@pytest.mark.parametrize("contexts", [(1100, 1000), (1000, 1100)])
def test_tables_that_are_wider_than_a_context_share_what_it_reaches(contexts: tuple[int, int]) -> None:
    # Behind its context, and in the block where that ends, a table may hold what another row has there.
    rows = make_shared_rows(
        Shape(3, 64, torch.float32), [(1, context) for context in contexts], [Sharing(range(2), 992)]
    )
    tables = rows.block_tables.clone()
    shorter = contexts.index(1000)
    tables[shorter, 62:] = tables[1 - shorter, 62:]
    wide = replace(rows, block_tables=tables)
    assert torch.equal(attend_shared(wide)[0], attend(wide)[0])


def test_memory_of_many_rows_is_laid_out_apart() -> None:
    generator = torch.Generator().manual_seed(5)
    lengths: list[Any] = torch.randint(520, 1200, (40,), generator=generator).tolist()
    rows = make_shared_rows(
        Shape(3, 24, torch.float16, num_kv_heads=1),
        [(1 + (index % 4 == 0) * 2, length) for index, length in enumerate(lengths)],
        [Sharing(range(0, 10), 512), Sharing(range(40), 448)],
    )
    assert torch.equal(attend_shared(rows)[0], attend(rows)[0])

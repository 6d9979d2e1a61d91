"""Splits that rows share are read once for several of them.

A row does not get the bits that it gets alone: in the interpreter a product of matrices is numpy's, whose rounding
depends on where in its tile a row stands.
"""

import numpy as np
import pytest
import torch

from radixserve.attention.backend import ForwardBatch, KVLayer
from radixserve.attention.paged_triton import PagedTritonBackend
from radixserve.kernels.paged_decode import DecodePlan, find_decode_runs, paged_decode, plan_decode
from tests.kernels.interpreted.paged_rows import PagedRows, Shape, assert_close, shapes
from tests.kernels.interpreted.test_paged_decode import decode
from tests.kernels.shared_rows import Sharing, make_shared_rows

SPLIT_TOKENS = 32
# Context lengths, and what the rows share: two prompts, conversations under one of them, runs that end inside a split,
# and a row that has nothing of its own but its token.
LENGTHS = [129, 150, 100, 97, 140, 33, 70]
SHARINGS = [Sharing([0, 1], 128), Sharing([0, 1, 2, 3], 96), Sharing([4, 6], 64), Sharing([0, 1, 2, 3, 5], 32)]


def plan_shared(rows: PagedRows) -> DecodePlan:
    runs = find_decode_runs(
        rows.block_tables.numpy(),
        np.array(rows.context_lengths),
        block_size=rows.shape.block_size,
        split_tokens=SPLIT_TOKENS,
        group_size=rows.shape.group_size,
    )
    return plan_decode(
        range(len(rows.starts)),
        rows.starts,
        rows.context_lengths,
        split_tokens=SPLIT_TOKENS,
        device=rows.query.device,
        runs=runs,
        group_size=rows.shape.group_size,
    )


def decode_shared(rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.full(rows.query.shape, torch.nan, dtype=rows.query.dtype)
    log_sums = torch.full(rows.query.shape[:2], torch.nan)
    arguments = (rows.query, rows.key_cache, rows.value_cache, rows.block_tables)
    paged_decode(*arguments, plan_shared(rows), output, log_sums, scale=rows.shape.scale)
    return output, log_sums


@pytest.mark.parametrize("shape", shapes())
def test_decode_over_shared_blocks_equals_the_reference(shape: Shape) -> None:
    rows = make_shared_rows(shape, [(1, length) for length in LENGTHS], SHARINGS)
    assert_close(rows, *decode_shared(rows))


def test_one_row_has_nothing_to_share() -> None:
    rows = make_shared_rows(Shape(3, 64, torch.float16), [(1, 100)], [])
    plain = decode(rows, SPLIT_TOKENS)
    for actual, expected in zip(decode_shared(rows), plain, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("group_size", "num_programs"), [(1, 6 + 9), (3, 6 + 9), (4, 7 + 9), (8, 10 + 9), (9, 28)])
def test_a_split_is_read_once_for_as_many_rows_as_fit_a_tile(group_size: int, num_programs: int) -> None:
    rows = make_shared_rows(Shape(group_size, 64, torch.float32), [(1, length) for length in LENGTHS], SHARINGS)
    assert len(plan_shared(rows).splits) == num_programs


def test_a_nan_in_a_shared_block_reaches_the_rows_that_share_it_and_no_other() -> None:
    rows = make_shared_rows(Shape(2, 64, torch.float32), [(1, length) for length in LENGTHS], SHARINGS)
    rows.value_cache[rows.blocks_of(4)[0], :, 3] = torch.nan
    is_bad = decode_shared(rows)[0].isnan().flatten(1).any(1)
    assert is_bad.nonzero().flatten().tolist() == [4, 6]


@pytest.mark.parametrize("context_lengths", [[513, 530, 520], [513, 200, 20]])
def test_the_backend_shares_what_rows_of_a_step_have_in_common(context_lengths: list[int]) -> None:
    shape = Shape(3, 64, torch.float32, num_kv_heads=1)
    sharers = [row for row, context in enumerate(context_lengths) if context > 512]
    rows = make_shared_rows(shape, [(1, length) for length in context_lengths], [Sharing(sharers, 512)])
    unread = torch.zeros(3, dtype=torch.int64)
    batch = ForwardBatch(unread, unread, unread, [1, 1, 1], context_lengths, rows.block_tables, unread)
    backend = PagedTritonBackend(num_heads=3, num_kv_heads=1, head_dim=64, dtype=torch.float32, block_size=16)
    metadata = backend.prepare(batch)
    assert metadata.decode is not None
    # Splits of 256: two that all share, and one of each row's own; or three of one row and one each of the others.
    assert len(metadata.decode.splits) == 5
    output = backend.forward(KVLayer(rows.key_cache, rows.value_cache), rows.query, metadata)
    torch.testing.assert_close(output, rows.expected()[0], atol=1e-5, rtol=0)

import pytest
import torch

from radixserve.kernels.paged_decode import paged_decode, plan_decode
from tests.kernels.interpreted.paged_rows import PagedRows, Shape, assert_close, make_rows, shapes

LENGTHS = (0, 1, 15, 16, 17, 130)
LONG_LENGTHS = (0, 1, 256, 257, 700)
SPLIT_TOKENS = 256


def decode(rows: PagedRows, split_tokens: int = SPLIT_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.full(rows.query.shape, torch.nan, dtype=rows.query.dtype)
    log_sums = torch.full(rows.query.shape[:2], torch.nan)
    plan = plan_decode(
        range(len(rows.starts)),
        rows.starts,
        rows.context_lengths,
        split_tokens=split_tokens,
        device=rows.query.device,
    )
    arguments = (rows.query, rows.key_cache, rows.value_cache, rows.block_tables)
    paged_decode(*arguments, plan, output, log_sums, scale=rows.shape.scale)
    return output, log_sums


@pytest.mark.parametrize("shape", shapes())
def test_decode_equals_the_reference(shape: Shape) -> None:
    rows = make_rows(shape, [(1, length) for length in LENGTHS])
    assert_close(rows, *decode(rows))


@pytest.mark.parametrize("shape", shapes())
def test_decode_of_split_contexts_equals_the_reference(shape: Shape) -> None:
    rows = make_rows(shape, [(1, length) for length in LENGTHS])
    assert_close(rows, *decode(rows, split_tokens=64))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_of_long_contexts_equals_the_reference(head_dim: int) -> None:
    rows = make_rows(Shape(4, head_dim, torch.float32), [(1, length) for length in LONG_LENGTHS])
    assert_close(rows, *decode(rows))


def test_decode_merges_more_splits_than_it_reads_at_once() -> None:
    # Of 32 splits and 8 heads, some have their highest score in the second half, so that the first is scaled down.
    rows = make_rows(Shape(4, 64, torch.float32), [(1, 500), (1, 3)])
    assert_close(rows, *decode(rows, split_tokens=16))


def test_an_empty_context_gives_zeros_and_a_sum_of_nothing() -> None:
    rows = make_rows(Shape(2, 64, torch.float32), [(1, 0), (1, 20)])
    for split_tokens in (16, 256):
        output, log_sums = decode(rows, split_tokens)
        assert torch.equal(output[0], torch.zeros(4, 64))
        assert torch.equal(log_sums[0], torch.full((4,), -torch.inf))


def test_a_row_gets_the_same_numbers_whatever_shares_its_batch() -> None:
    shape = Shape(3, 64, torch.float16)
    rows = make_rows(shape, [(1, 130), (1, 700), (1, 16)])
    together, sums_together = decode(rows)
    for row in range(3):
        alone = PagedRows(
            shape,
            rows.query[row : row + 1],
            rows.key_cache,
            rows.value_cache,
            rows.block_tables[row : row + 1],
            [1],
            rows.context_lengths[row : row + 1],
        )
        output, log_sums = decode(alone)
        assert torch.equal(output[0], together[row])
        assert torch.equal(log_sums[0], sums_together[row])


def test_decode_without_log_sums_writes_the_same_output() -> None:
    rows = make_rows(Shape(4, 80, torch.float32, num_kv_heads=1), [(1, 20), (1, 70)])
    for split_tokens in (64, 128):
        plan = plan_decode(range(2), range(2), [20, 70], split_tokens=split_tokens, device=rows.query.device)
        output = torch.zeros(rows.query.shape)
        arguments = (rows.query, rows.key_cache, rows.value_cache, rows.block_tables)
        paged_decode(*arguments, plan, output, scale=rows.shape.scale)
        assert torch.equal(output, decode(rows, split_tokens)[0])


def test_tokens_outside_the_plan_are_left_as_they_are() -> None:
    rows = make_rows(Shape(1, 64, torch.float32), [(1, 9), (1, 40), (1, 17)])
    plan = plan_decode([1], [1], [40], split_tokens=16, device=rows.query.device)
    output, log_sums = torch.full(rows.query.shape, 7.0), torch.full((3, 2), 7.0)
    arguments = (rows.query, rows.key_cache, rows.value_cache, rows.block_tables)
    paged_decode(*arguments, plan, output, log_sums, scale=rows.shape.scale)
    assert torch.equal(output[[0, 2]], torch.full((2, 2, 64), 7.0))
    assert torch.equal(log_sums[[0, 2]], torch.full((2, 2), 7.0))
    torch.testing.assert_close(output[1], rows.expected()[0][1], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("split_tokens", [16, 256])
def test_a_nan_reaches_its_own_row_and_no_other(split_tokens: int) -> None:
    rows = make_rows(Shape(2, 64, torch.float32), [(1, 40), (1, 50), (1, 5)])
    expected, _ = rows.expected()
    rows.key_cache[rows.blocks_of(1)[1], :, 3] = torch.nan
    output, _ = decode(rows, split_tokens)
    assert output[1].isnan().all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=0)

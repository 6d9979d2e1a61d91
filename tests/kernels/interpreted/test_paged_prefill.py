import pytest
import torch

from radixserve.kernels.paged_prefill import paged_prefill, plan_prefill, tokens_per_tile
from tests.kernels.interpreted.paged_rows import PagedRows, Shape, assert_close, make_rows, shapes

# (query length, context length): whole prompts, chunks on a cached prefix, and single tokens among them.
STEP = [(1, 0), (1, 1), (15, 15), (16, 16), (2, 17), (17, 17), (1, 130), (16, 130), (130, 130)]
LONG_STEP = [(700, 700), (1, 700), (130, 700), (17, 256), (16, 257)]


def prefill(rows: PagedRows, max_tokens: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.full(rows.query.shape, torch.nan, dtype=rows.query.dtype)
    log_sums = torch.full(rows.query.shape[:2], torch.nan)
    shape = rows.shape
    plan = plan_prefill(
        range(len(rows.starts)),
        rows.starts,
        rows.query_lengths,
        rows.context_lengths,
        tokens_per_tile=min(max_tokens, tokens_per_tile(shape.head_dim, shape.dtype, shape.group_size)),
        device=rows.query.device,
    )
    arguments = (rows.query, rows.key_cache, rows.value_cache, rows.block_tables)
    paged_prefill(*arguments, plan, output, log_sums, scale=shape.scale)
    return output, log_sums


@pytest.mark.parametrize("shape", shapes())
def test_prefill_equals_the_reference(shape: Shape) -> None:
    rows = make_rows(shape, STEP)
    assert_close(rows, *prefill(rows))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_of_long_rows_equals_the_reference(head_dim: int) -> None:
    rows = make_rows(Shape(4, head_dim, torch.float16), LONG_STEP)
    assert_close(rows, *prefill(rows))


def test_a_block_size_that_is_no_power_of_two_is_as_good() -> None:
    rows = make_rows(Shape(2, 64, torch.float32, block_size=12), STEP)
    assert_close(rows, *prefill(rows))


def test_tiles_of_fewer_tokens_give_the_same_numbers() -> None:
    rows = make_rows(Shape(4, 64, torch.float32), [(9, 30), (33, 33)])
    for whole, cut in zip(prefill(rows), prefill(rows, max_tokens=5), strict=True):
        torch.testing.assert_close(cut, whole, atol=1e-6, rtol=0)


def test_a_chunk_gets_what_the_whole_prompt_gets() -> None:
    shape = Shape(3, 80, torch.float32)
    rows = make_rows(shape, [(70, 70)])
    whole, _ = prefill(rows)
    for start, stop in ((0, 1), (1, 33), (33, 70)):
        chunk = PagedRows(
            shape,
            rows.query[start:stop],
            rows.key_cache,
            rows.value_cache,
            rows.block_tables,
            [stop - start],
            [stop],
        )
        torch.testing.assert_close(prefill(chunk)[0], whole[start:stop], atol=1e-6, rtol=0)


def test_tokens_that_see_nothing_get_zeros() -> None:
    rows = make_rows(Shape(2, 64, torch.float32), [(5, 3)])
    output, log_sums = prefill(rows)
    assert torch.equal(output[:2], torch.zeros(2, 4, 64))
    assert torch.equal(log_sums[:2], torch.full((2, 4), -torch.inf))
    assert_close(rows, output, log_sums)


def test_tokens_outside_the_plan_are_left_as_they_are() -> None:
    rows = make_rows(Shape(1, 64, torch.float32), [(3, 9), (4, 40), (1, 17)])
    plan = plan_prefill([1], [3], [4], [40], tokens_per_tile=3, device=rows.query.device)
    output = torch.full(rows.query.shape, 7.0)
    arguments = (rows.query, rows.key_cache, rows.value_cache, rows.block_tables)
    paged_prefill(*arguments, plan, output, scale=rows.shape.scale)
    assert torch.equal(output[[0, 1, 2, 7]], torch.full((4, 2, 64), 7.0))
    torch.testing.assert_close(output[3:7], rows.expected()[0][3:7], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_nan_reaches_its_own_row_and_no_other() -> None:
    rows = make_rows(Shape(2, 64, torch.float32), [(20, 40), (7, 50), (5, 5)])
    expected, _ = rows.expected()
    rows.value_cache[rows.blocks_of(1)[1], :, 3] = torch.nan
    output, _ = prefill(rows)
    assert output[20:27].isnan().all()
    torch.testing.assert_close(output[:20], expected[:20], atol=1e-5, rtol=0)
    torch.testing.assert_close(output[27:], expected[27:], atol=1e-5, rtol=0)

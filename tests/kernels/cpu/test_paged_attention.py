import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from radixserve.kernels.cpu.paged_attention import AttentionPlan, paged_attention, plan_attention
from tests.kernels.interpreted.paged_rows import PagedRows, Shape, make_rows

# (query length, context length): what a step can hold, decodes among chunks. The longest are read in three splits, and
# of the five queries of 2050 some see no key of the second split.
DECODES = [(1, length) for length in (0, 1, 15, 16, 17, 130, 700, 1100)]
PREFILLS = [(15, 15), (2, 17), (16, 16), (17, 130), (130, 130), (3, 700), (5, 2050), (2, 4200)]
MIXED = [(1, 130), (33, 60), (1, 1), (16, 17), (1, 700), (2, 130), (1, 16)]
STEPS = {"decodes": DECODES, "prefills": PREFILLS, "mixed": MIXED}


def shapes() -> list[Any]:
    """Return parameters of a test: each group size, head size and dtype, and the rest of their products as slow."""
    parameters = []
    groups, head_dims, dtypes, block_sizes = (1, 3, 4, 8), (8, 64, 80, 128), (torch.float32, torch.float16), (1, 4, 16)
    for group_size, head_dim, dtype, block_size in itertools.product(groups, head_dims, dtypes, block_sizes):
        place = groups.index(group_size) + head_dims.index(head_dim) + dtypes.index(dtype)
        is_plain = place % 4 == 0 and block_sizes[place % 3] == block_size
        shape = Shape(group_size, head_dim, dtype, block_size)
        parameters.append(pytest.param(shape, id=str(shape), marks=() if is_plain else pytest.mark.slow))
    return parameters


def plan_rows(rows: PagedRows, block_size: int | None = None) -> AttentionPlan:
    return plan_attention(
        rows.query_lengths,
        rows.context_lengths,
        rows.block_tables,
        num_heads=rows.query.shape[1],
        num_kv_heads=rows.shape.num_kv_heads,
        head_dim=rows.shape.head_dim,
        block_size=block_size,
    )


def attend(
    rows: PagedRows, *, block_size: int | None = None, lanes: Literal[0, 8] = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    log_sums = torch.full(rows.query.shape[:2], torch.nan)
    caches = (rows.key_cache, rows.value_cache)
    output = paged_attention(
        rows.query.float(),
        *caches,
        plan_rows(rows, block_size),
        scale=rows.shape.scale,
        log_sums=log_sums,
        lanes=lanes,
    )
    return output, log_sums


def assert_threads_change_no_bit(rows: PagedRows, block_size: int | None = None) -> None:
    """Compare one thread with several; a test that calls it keeps_threads."""
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(attend(rows, block_size=block_size))
    for output, log_sums in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(log_sums, results[0][1])


def only(rows: PagedRows, row: int) -> PagedRows:
    """Return one of the rows, over the same cache."""
    start, length = rows.starts[row], rows.query_lengths[row]
    return replace(
        rows,
        query=rows.query[start : start + length],
        block_tables=rows.block_tables[row : row + 1],
        query_lengths=[length],
        context_lengths=[rows.context_lengths[row]],
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", shapes())
def test_attention_and_its_log_sums_equal_the_reference(shape: Shape, step: str) -> None:
    rows = make_rows(shape, STEPS[step])
    output, log_sums = attend(rows)
    expected, expected_sums = rows.expected()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(log_sums, expected_sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_vectors_of_any_width_give_the_same_bits(head_dim: int) -> None:
    rows = make_rows(Shape(3, head_dim, torch.float16, 16), PREFILLS)
    for narrow, widest in zip(attend(rows, lanes=8), attend(rows), strict=True):
        assert torch.equal(narrow, widest)


@pytest.mark.parametrize("group_size", [5, 16, 97])
def test_any_number_of_heads_may_share_a_key(group_size: int) -> None:
    # Of 97 heads, even one token fills more than a tile.
    rows = make_rows(Shape(group_size, 24, torch.float32, num_kv_heads=1), [(1, 20), (7, 9)])
    torch.testing.assert_close(attend(rows)[0], rows.expected()[0], atol=1e-5, rtol=0)


def test_a_query_that_sees_nothing_gets_zeros_and_a_sum_of_nothing() -> None:
    rows = make_rows(Shape(2, 64, torch.float32), [(1, 0), (3, 0), (1, 20)])
    output, log_sums = attend(rows)
    assert torch.equal(output[:4], torch.zeros(4, 4, 64))
    assert torch.equal(log_sums[:4], torch.full((4, 4), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_gets_the_same_bits_whatever_shares_its_step(dtype: torch.dtype) -> None:
    rows = make_rows(Shape(3, 64, dtype), [*MIXED, *PREFILLS])
    output, log_sums = attend(rows)
    for row, (start, length) in enumerate(zip(rows.starts, rows.query_lengths, strict=True)):
        alone, sums_alone = attend(only(rows, row))
        assert torch.equal(output[start : start + length], alone)
        assert torch.equal(log_sums[start : start + length], sums_alone)


@pytest.mark.usefixtures("keeps_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    rows = make_rows(Shape(3, 80, dtype, block_size=4), [*MIXED, *PREFILLS, *DECODES])
    assert_threads_change_no_bit(rows)


def test_a_nan_reaches_every_query_that_sees_it_and_no_other_row() -> None:
    steps = [(1, 130), (5, 20), (1, 700), (40, 130), (1, 1)]
    clean = make_rows(Shape(3, 64, torch.float32), steps)
    expected, _ = clean.expected()
    for cache in ("key_cache", "value_cache"):
        for bad_row, (length, context) in enumerate(steps):
            rows = make_rows(Shape(3, 64, torch.float32), steps)
            # The first slot of the row's first block, which all of its queries see.
            getattr(rows, cache)[rows.block_tables[bad_row, 0], :, 0] = torch.nan
            assert context > 0
            output, _ = attend(rows)
            start = rows.starts[bad_row]
            assert output[start : start + length].isnan().all()
            output[start : start + length] = expected[start : start + length]
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_scores_of_any_size_are_taken() -> None:
    rows = make_rows(Shape(2, 64, torch.float32), [(1, 300), (20, 90)])
    for factor in (1e-20, 50.0, 1e4):
        scaled = replace(rows, query=rows.query * factor)
        output, log_sums = attend(scaled)
        expected, expected_sums = scaled.expected()
        # What decides between scores of thousands is the rounding of either's sums.
        torch.testing.assert_close(output, expected, atol=1e-5 if factor < 1 else 1e-2, rtol=0)
        torch.testing.assert_close(log_sums, expected_sums, atol=1e-5, rtol=1e-5)


def test_caches_may_be_views_with_strides_of_their_own() -> None:
    rows = make_rows(Shape(3, 64, torch.float32), MIXED)
    expected, _ = attend(rows)
    # [num_blocks, block_size, num_kv_heads, head_dim] with room after each head.
    views = []
    for cache in (rows.key_cache, rows.value_cache):
        wide = torch.full((cache.shape[0], 16, 2, 72), torch.nan)
        view = wide[..., :64].transpose(1, 2)
        view.copy_(cache)
        views.append(view)
    output, _ = attend(replace(rows, key_cache=views[0], value_cache=views[1]))
    assert torch.equal(output, expected)


def test_two_parts_of_a_context_merge_by_their_log_sums() -> None:
    rows = make_rows(Shape(3, 64, torch.float32), [(1, 608)])
    whole, _ = attend(rows)
    parts = []
    for table in rows.block_tables.split([20, 18], dim=1):
        part = replace(rows, block_tables=table.contiguous(), context_lengths=[table.shape[1] * 16])
        parts.append(attend(part))
    shares = torch.stack([log_sums for _, log_sums in parts]).softmax(0)
    merged = sum(share.unsqueeze(-1) * output for share, (output, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=0)


def test_a_prompt_in_chunks_gets_the_bits_of_the_whole_one() -> None:
    rows = make_rows(Shape(3, 64, torch.float16), [(200, 200)])
    whole, _ = attend(rows)
    for end, length in ((70, 70), (172, 102), (200, 28)):
        chunk = replace(rows, query=rows.query[end - length : end], query_lengths=[length], context_lengths=[end])
        assert torch.equal(attend(chunk)[0], whole[end - length : end])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query": torch.zeros(3, 4, 64)}, "query"),
        ({"query": torch.zeros(2, 256)}, "query"),
        ({"query": torch.zeros(2, 4, 64).half()}, "float16"),
        ({"query": torch.zeros(2, 4, 128)[:, :, ::2]}, "strides"),
        ({"key_cache": torch.zeros(5, 2, 16, 32), "value_cache": torch.zeros(5, 2, 16, 32)}, "planned"),
        ({"key_cache": torch.zeros(5, 4, 16, 64), "value_cache": torch.zeros(5, 4, 16, 64)}, "planned"),
        ({"key_cache": torch.zeros(5, 2, 16, 64).half()}, "float16"),
        ({"value_cache": torch.zeros(4, 2, 16, 64)}, "alike"),
        ({"value_cache": torch.zeros(5, 16, 2, 64).transpose(1, 2)}, "alike"),
        ({"key_cache": torch.zeros(5, 2, 16, 64).bfloat16(), "value_cache": torch.zeros(5, 2, 16, 64).bfloat16()}, "b"),
        ({"log_sums": torch.zeros(2, 3)}, "log_sums"),
        ({"log_sums": torch.zeros(2, 4, dtype=torch.float64)}, "log_sums"),
    ],
)
def test_attention_names_what_does_not_fit(changes: dict[str, torch.Tensor], named: str) -> None:
    tables = torch.zeros(2, 1, dtype=torch.int64)
    plan = plan_attention([1, 1], [3, 3], tables, num_heads=4, num_kv_heads=2, head_dim=64)
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 64),
        "key_cache": torch.zeros(5, 2, 16, 64),
        "value_cache": torch.zeros(5, 2, 16, 64),
    }
    with pytest.raises(ValueError, match=named):
        paged_attention(**arguments | changes, plan=plan, scale=1.0)


@pytest.mark.parametrize(
    ("contexts", "tables", "num_heads", "named"),
    [
        ([3], torch.zeros(2, 1, dtype=torch.int64), 4, "context lengths"),
        ([3, 3], torch.zeros(1, 1, dtype=torch.int64), 4, "block_tables"),
        ([3, 3], torch.zeros(2, 1, dtype=torch.int32), 4, "int64"),
        ([3, 3], torch.zeros(2, 2, dtype=torch.int64).T, 4, "contiguous"),
        ([3, 3], torch.zeros(2, 1, dtype=torch.int64), 5, "evenly"),
    ],
)
def test_a_plan_names_what_does_not_fit(contexts: list[int], tables: torch.Tensor, num_heads: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_attention([1, 1], contexts, tables, num_heads=num_heads, num_kv_heads=2, head_dim=64)

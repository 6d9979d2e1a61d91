"""The launchers of paged attention refuse what their kernels would read wrongly."""

from typing import Any

import numpy as np
import pytest
import torch

from radixserve.kernels.paged_decode import DecodePlan, paged_decode, plan_decode
from radixserve.kernels.paged_prefill import paged_prefill, plan_prefill
from radixserve.kernels.shared_runs import SharedRun

CPU = torch.device("cpu")


def decode_reads(plan: DecodePlan) -> list[tuple[int, ...]]:
    """Return by places what each partial result is of: its place, token, row of the block tables, start and end."""
    reads = []
    for first, count, table_row, start, end in plan.splits.tolist():
        for token, place in plan.members[first : first + count].tolist():
            reads.append((place, token, table_row, start, end))
    return sorted(reads)


def arguments(**changes: Any) -> dict[str, Any]:
    """What both launchers take, but for the changes: 3 tokens, 4 query heads, 2 K/V heads."""
    return {
        "query": torch.zeros(3, 4, 64),
        "key_cache": torch.zeros(5, 2, 16, 64),
        "value_cache": torch.zeros(5, 2, 16, 64),
        "block_tables": torch.zeros(3, 4, dtype=torch.int64),
        "output": torch.zeros(3, 4, 64),
    } | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query": torch.zeros(3, 256)}, "must have 3, 4 and 2 axes"),
        ({"block_tables": torch.zeros(3, dtype=torch.int64)}, "must have 3, 4 and 2 axes"),
        ({"query": torch.zeros(3, 4, 48)}, "head size is 48"),
        ({"query": torch.zeros(3, 4, 64, dtype=torch.float64)}, "float64"),
        ({"key_cache": torch.zeros(4, 2, 16, 64)}, "must be alike"),
        ({"query": torch.zeros(3, 4, 80), "output": torch.zeros(3, 4, 80)}, "heads of 80 elements"),
        ({"query": torch.zeros(3, 3, 64)}, "3 query heads over 2 K/V heads"),
        ({"query": torch.zeros(3, 34, 64), "output": torch.zeros(3, 34, 64)}, "at most 16"),
        ({"output": torch.zeros(2, 4, 64)}, "output is"),
        ({"log_sums": torch.zeros(3, 2)}, "log_sums is"),
        ({"log_sums": torch.zeros(3, 4).half()}, "log_sums is"),
        ({"output": torch.zeros(3, 4, 64).half()}, "one dtype"),
        ({"value_cache": torch.zeros(5, 2, 16, 64).half()}, "one dtype"),
        ({"block_tables": torch.zeros(3, 4)}, "block_tables is torch.float32"),
        ({"block_tables": torch.zeros(4, 3, dtype=torch.int64).T}, "block_tables in its last"),
        ({"query": torch.zeros(3, 64, 4).transpose(1, 2)}, "query must be contiguous"),
        ({"key_cache": torch.zeros(5, 16, 2, 64).transpose(1, 2)}, "must be contiguous"),
        ({"output": torch.zeros(3, 5, 64)[:, :4]}, "must be contiguous"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int64, device="meta")}, "one device"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, torch.Tensor], named: str) -> None:
    decode = plan_decode([0], [0], [5], split_tokens=16, device=CPU)
    prefill = plan_prefill([0], [0], [3], [5], tokens_per_tile=4, device=CPU)
    with pytest.raises(ValueError, match=named):
        paged_decode(**arguments(**changes), plan=decode, scale=1.0)
    with pytest.raises(ValueError, match=named):
        paged_prefill(**arguments(**changes), plan=prefill, scale=1.0)


def test_a_plan_of_tiles_that_are_too_large_is_refused() -> None:
    plan = plan_prefill([0], [0], [3], [5], tokens_per_tile=1000, device=CPU)
    with pytest.raises(ValueError, match="tiles of 1000 tokens; at most 32 fit"):
        paged_prefill(**arguments(), plan=plan, scale=1.0)


def test_a_decode_plan_covers_each_context_once_in_splits_of_one_size() -> None:
    contexts = [0, 1, 16, 17, 100]
    plan = plan_decode(range(5), range(5), contexts, split_tokens=16, device=CPU)
    assert plan.rows is not None
    for context, (token, first, end) in zip(contexts, plan.rows.tolist(), strict=True):
        lines = [reads for place, *reads in decode_reads(plan) if first <= place < end]
        assert {line[0] for line in lines} == {token}
        assert {line[1] for line in lines} == {token}
        covered = [position for _, _, start, stop in lines for position in range(start, stop)]
        assert covered == list(range(context))
        assert all(start % 16 == 0 for _, _, start, _ in lines)


def test_a_decode_plan_reads_a_run_once_for_as_many_rows_as_fit_a_tile() -> None:
    contexts = [40, 70, 50, 33, 20]
    run = SharedRun(np.array([0, 1, 2, 3]), 0, 32, -1)
    part = SharedRun(np.array([1, 2]), 32, 48, 0)
    separate = plan_decode(range(5), range(5), contexts, split_tokens=16, device=CPU)
    for group_size, num_programs in ((4, 3 + 3 + 4), (5, 5 + 3 + 4), (8, 5 + 3 + 4)):
        plan = plan_decode(
            range(5), range(5), contexts, split_tokens=16, device=CPU, runs=[run, part], group_size=group_size
        )
        assert len(plan.splits) == num_programs
        assert (plan.splits[:, 1] * group_size).max() <= 16
        # Each row's splits are read from the table of a row that shares them.
        allowed = {(row, start) for row in range(4) for start in (0, 16)} | {(1, 32), (2, 32)}
        reads = decode_reads(plan)
        for _, token, table_row, start, _ in reads:
            assert token == table_row or {(token, start), (table_row, start)} <= allowed
        assert [(place, token, *rest) for place, token, _, *rest in reads] == [
            (place, token, *rest) for place, token, _, *rest in decode_reads(separate)
        ]


def test_a_prefill_plan_covers_each_token_once() -> None:
    queries, contexts = [1, 4, 5, 9], [30, 4, 12, 9]
    plan = plan_prefill(range(4), [0, 1, 5, 10], queries, contexts, tokens_per_tile=4, device=CPU)
    covered = [
        (row, token + i, position + i) for row, token, count, position in plan.tiles.tolist() for i in range(count)
    ]
    starts = [0, 1, 5, 10]
    assert covered == [
        (row, starts[row] + i, contexts[row] - queries[row] + i) for row in range(4) for i in range(queries[row])
    ]

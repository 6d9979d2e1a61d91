from array import array

import torch

from radixserve.core.batch import ScheduledBatch, ScheduledRow
from radixserve.runner.forward_batch import build_forward_batch
from tests.runner.tiny_executor import row

CPU = torch.device("cpu")


def test_rows_lie_behind_one_another_with_their_positions_and_slots() -> None:
    rows = [
        row([10, 11, 12, 13, 14, 15], [7, 2], start=3),
        row([20], [5]),
        row([30, 31, 32, 33, 34, 35, 36, 37, 38], [1, 9, 4], start=8),
    ]
    batch = build_forward_batch(ScheduledBatch(rows=rows), 4, CPU)
    assert batch.token_ids.tolist() == [13, 14, 15, 20, 38]
    assert batch.positions.tolist() == [3, 4, 5, 0, 8]
    assert batch.slot_mapping.tolist() == [31, 8, 9, 20, 16]
    assert batch.query_lengths == [3, 1, 1]
    assert batch.context_lengths == [6, 1, 9]
    assert batch.block_tables.tolist() == [[7, 2, 0], [5, 0, 0], [1, 9, 4]]
    assert batch.logits_indices.tolist() == [2, 3, 4]
    indices = (batch.token_ids, batch.positions, batch.slot_mapping, batch.block_tables, batch.logits_indices)
    assert all(tensor.dtype is torch.int64 for tensor in indices)


def test_blocks_beyond_the_context_are_left_out() -> None:
    batch = build_forward_batch(ScheduledBatch(rows=[row([1, 2, 3], [6, 5, 4, 3]), row([1] * 5, [8, 9, 2])]), 4, CPU)
    assert batch.block_tables.tolist() == [[6, 0], [8, 9]]


def test_a_row_may_grow_as_soon_as_its_tensors_are_built() -> None:
    token_ids, block_table = array("i", [1, 2]), array("i", [3])
    build_forward_batch(ScheduledBatch(rows=[ScheduledRow(token_ids, 0, block_table)]), 4, CPU)
    token_ids.append(3)  # BufferError if a view were left behind
    block_table.append(4)

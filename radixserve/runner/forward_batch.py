"""From the scheduler's rows to the tensors that the model reads."""

import numpy as np
import torch

from radixserve.attention.backend import ForwardBatch
from radixserve.core.batch import ScheduledBatch


def build_forward_batch(batch: ScheduledBatch, block_size: int, device: torch.device) -> ForwardBatch:
    """Lay the rows of a batch, at least one, behind one another.

    logits_indices holds the last token of every row, of those without samples too: their logits are looked at to see
    whether the row's numbers are finite. Block tables are cut to the blocks that a row's context reaches.
    """
    rows = batch.rows
    query_lengths = np.array([len(row.token_ids) for row in rows])
    num_computed = np.array([row.num_computed_tokens for row in rows])
    context_lengths = num_computed + query_lengths
    ends = query_lengths.cumsum()
    token_ids = np.concatenate([np.frombuffer(row.token_ids, np.int32) for row in rows]).astype(np.int64)  # [T]
    num_blocks = (-(-context_lengths // block_size)).tolist()
    block_tables = np.zeros((len(rows), max(num_blocks)), dtype=np.int64)
    for index, (row, count) in enumerate(zip(rows, num_blocks, strict=True)):
        block_tables[index, :count] = np.frombuffer(row.block_table, np.int32, count)

    row_of_token = np.arange(len(rows))
    positions = num_computed
    if len(token_ids) > len(rows):
        row_of_token = np.repeat(row_of_token, query_lengths)
        positions = np.arange(len(token_ids)) + np.repeat(context_lengths - ends, query_lengths)  # [T]
    blocks, offsets = np.divmod(positions, block_size)
    slot_mapping = block_tables[row_of_token, blocks] * block_size + offsets

    def to_device(values: "np.typing.NDArray[np.int64]") -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device)

    return ForwardBatch(
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        slot_mapping=to_device(slot_mapping),
        query_lengths=query_lengths.tolist(),
        context_lengths=context_lengths.tolist(),
        block_tables=torch.from_numpy(block_tables),
        logits_indices=to_device(ends - 1),
    )

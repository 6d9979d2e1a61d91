"""A ModelExecutor over a tiny random model, and the rows to feed it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixserve.attention.backend import KVLayer
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from radixserve.core.batch import BlockCopy, SampledTokens, SampleSlot, ScheduledBatch, ScheduledRow
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32
from radixserve.runner.kv_storage import allocate_kv_layers
from radixserve.runner.model_executor import ModelExecutor
from tests.sampling.slots import slot

BLOCK_SIZE = 4


@dataclass
class TinyExecutor:
    executor: ModelExecutor
    kv_layers: list[KVLayer]

    def run(self, *rows: ScheduledRow, copies: Sequence[tuple[int, int]] = ()) -> SampledTokens:
        return self.executor.execute(ScheduledBatch(rows=list(rows), copies=[BlockCopy(*copy) for copy in copies]))

    def storage(self) -> list[torch.Tensor]:
        return [cache for layer in self.kv_layers for cache in (layer.key, layer.value)]


def tiny_executor(path: Path, num_blocks: int = 48) -> TinyExecutor:
    model, device = read_model_config(path), torch.device("cpu")
    decoder = load_model(path, model, precision=FLOAT32, device=device, show_progress=False)
    kv_layers = allocate_kv_layers(
        model, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=device
    )
    attention = PagedSdpaBackend(block_size=BLOCK_SIZE, num_kv_heads=model.num_kv_heads)
    return TinyExecutor(ModelExecutor(decoder, kv_layers, attention), kv_layers)


def row(
    tokens: Sequence[int], block_table: Sequence[int], *, start: int = 0, samples: Sequence[SampleSlot] = ()
) -> ScheduledRow:
    """Tokens `start` onwards of a sequence."""
    return ScheduledRow(
        token_ids=array("i", tokens[start:]),
        num_computed_tokens=start,
        block_table=array("i", block_table),
        samples=tuple(samples),
    )


def greedy(tokens: Sequence[int], **params: Any) -> SampleSlot:
    return slot(prompt=tokens, temperature=0, logprobs=5, **params)


def sampled_row(tokens: Sequence[int], block_table: Sequence[int], *, start: int = 0) -> ScheduledRow:
    """A row with one greedy slot."""
    return row(tokens, block_table, start=start, samples=[greedy(tokens)])

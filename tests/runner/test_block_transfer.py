from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from radixserve.attention.backend import KVLayer
from radixserve.core.batch import BlockCopy, BlockLoads, ScheduledBatch
from radixserve.runner.block_transfer import copy_in, copy_out
from tests.runner.tiny_executor import BLOCK_SIZE, TinyExecutor, sampled_row, tiny_executor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_layers(dtype: torch.dtype, seed: int) -> list[KVLayer]:
    generator = torch.Generator().manual_seed(seed)

    def cache() -> torch.Tensor:
        return torch.randn((9, 2, 4, 8), generator=generator).to(dtype)

    return [KVLayer(cache(), cache()) for _ in range(3)]


@pytest.mark.parametrize("num_at_once", [1, 2, 5])
def test_many_blocks_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch, num_at_once: int) -> None:
    layers, block_ids = random_layers(torch.float32, 0), array("i", [7, 0, 3, 8, 1])
    expected = copy_out(layers, block_ids)
    monkeypatch.setattr("radixserve.runner.block_transfer.MAX_GATHERED_BYTES", num_at_once * expected.shape[1])
    assert np.array_equal(copy_out(layers, block_ids), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_were_copied_out_and_in_again_are_the_same_in_every_layer(dtype: torch.dtype) -> None:
    source, destination = random_layers(dtype, 0), random_layers(dtype, 1)
    before = [(layer.key.clone(), layer.value.clone()) for layer in destination]
    blocks = copy_out(source, array("i", [7, 0, 3]))
    assert blocks.shape == (3, 3 * 2 * 2 * 4 * 8 * dtype.itemsize)
    copy_in(destination, array("i", [1, 8, 2]), blocks)
    for layer, from_layer, (key, value) in zip(destination, source, before, strict=True):
        for ours, theirs, old in ((layer.key, from_layer.key, key), (layer.value, from_layer.value, value)):
            assert torch.equal(ours[[1, 8, 2]], theirs[[7, 0, 3]])
            assert torch.equal(ours[[0, 3, 4, 5, 6, 7]], old[[0, 3, 4, 5, 6, 7]])


def test_a_block_is_packed_layer_by_layer_keys_first() -> None:
    layers = random_layers(torch.float32, 0)
    (block,) = copy_out(layers, array("i", [5]))
    expected = [part for layer in layers for part in (layer.key[5].numpy(), layer.value[5].numpy())]
    assert np.array_equal(block.view(np.float32), np.concatenate([part.ravel() for part in expected]))


@pytest.fixture
def tiny(tiny_model: Path) -> TinyExecutor:
    return tiny_executor(tiny_model)


def test_blocks_are_copied_out_before_anything_of_the_step_is_written_and_in_before_copies(tiny: TinyExecutor) -> None:
    tokens = list(range(80, 80 + 3 * BLOCK_SIZE))
    tiny.run(sampled_row(tokens, [0, 1, 2]))
    expected = copy_out(tiny.kv_layers, array("i", [0, 1, 2]))
    others = sampled_row(list(range(120, 120 + BLOCK_SIZE)), [0])
    loads = BlockLoads(array("i", [2]), expected[:1])
    batch = ScheduledBatch(rows=[others], copies=[BlockCopy(2, 5)], spills=array("i", [0, 2]), loads=loads)
    sampled = tiny.executor.execute(batch)
    assert sampled.spilled is not None
    assert np.array_equal(sampled.spilled, expected[[0, 2]])
    assert np.array_equal(copy_out(tiny.kv_layers, array("i", [2, 5])), expected[[0, 0]])
    assert not np.array_equal(copy_out(tiny.kv_layers, array("i", [0])), expected[:1])


def test_a_prompt_goes_on_from_loaded_blocks_as_from_computed_ones(tiny: TinyExecutor, tiny_model: Path) -> None:
    tokens = list(range(80, 80 + 3 * BLOCK_SIZE + 2))
    expected = tiny.run(sampled_row(tokens, [0, 1, 2, 3]))
    blocks = copy_out(tiny.kv_layers, array("i", [0, 1, 2]))
    other = tiny_executor(tiny_model)
    loads = BlockLoads(array("i", [9, 4, 6]), blocks)
    row = sampled_row(tokens, [9, 4, 6, 7], start=3 * BLOCK_SIZE)
    sampled = other.executor.execute(ScheduledBatch(rows=[row], loads=loads))
    assert sampled.token_ids == expected.token_ids


def test_a_step_without_rows_copies_out_and_in(tiny: TinyExecutor) -> None:
    blocks = copy_out(tiny.kv_layers, array("i", [0]))
    blocks[:] = 1
    tiny.executor.execute(ScheduledBatch(loads=BlockLoads(array("i", [3]), blocks)))
    sampled = tiny.executor.execute(ScheduledBatch(spills=array("i", [3])))
    assert sampled.spilled is not None
    assert sampled.spilled.all()

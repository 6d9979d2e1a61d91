import random

import pytest
import torch

from radixserve.attention.backend import ForwardBatch, KVLayer, Rotation
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from radixserve.kernels import reference

# (query length, context length): what a step can hold, decodes among chunks.
STEPS = {
    "one token": [(1, 1)],
    "decodes of one width": [(1, 17), (1, 18), (1, 32)],
    "decodes of many widths": [(1, length) for length in (1, 130, 15, 16, 17, 33, 2)],
    "whole prompts": [(length, length) for length in (2, 15, 16, 17, 130)],
    "chunks on a cached prefix": [(15, 16), (16, 130), (2, 17), (17, 34)],
    "mixed": [(1, 130), (5, 5), (1, 1), (16, 17), (1, 16), (130, 130), (1, 129), (2, 130)],
}


def make_batch(step: list[tuple[int, int]], block_size: int, seed: int = 0) -> tuple[ForwardBatch, int]:
    """Return a batch over shuffled blocks, and how many blocks there are; one block more than used, never named."""
    source = random.Random(seed)
    counts = [-(-context // block_size) for _, context in step]
    blocks = list(range(sum(counts) + 1))
    source.shuffle(blocks)
    tables = torch.zeros(len(step), max(counts), dtype=torch.int64)
    positions, slots = [], []
    for row, (query_length, context_length) in enumerate(step):
        own = torch.tensor([blocks.pop() for _ in range(counts[row])])
        tables[row, : counts[row]] = own
        row_positions = torch.arange(context_length - query_length, context_length)
        positions.append(row_positions)
        slots.append(own[row_positions // block_size] * block_size + row_positions % block_size)
    num_tokens = sum(query_length for query_length, _ in step)
    batch = ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_lengths=[query_length for query_length, _ in step],
        context_lengths=[context_length for _, context_length in step],
        block_tables=tables,
        logits_indices=torch.zeros(0, dtype=torch.int64),
    )
    return batch, sum(counts) + 1


def random_layer(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> KVLayer:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    generator = torch.Generator().manual_seed(1)
    return KVLayer(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def random_rotation(num_tokens: int, head_dim: int) -> Rotation:
    angles = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(9)) * 6.3
    return Rotation(angles.cos(), angles.sin())


def expected_attention(batch: ForwardBatch, layer: KVLayer, query: torch.Tensor) -> torch.Tensor:
    output, _ = reference.paged_attention(
        query,
        layer.key,
        layer.value,
        batch.block_tables,
        batch.context_lengths,
        batch.query_lengths,
        query.shape[-1] ** -0.5,
    )
    return output


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (9, 3, 64), (4, 1, 80), (8, 1, 80)])
def test_attention_equals_the_reference(
    step: str, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    batch, num_blocks = make_batch(STEPS[step], block_size)
    layer = random_layer(num_blocks, num_kv_heads, block_size, head_dim)
    query = torch.randn(len(batch.token_ids), num_heads, head_dim, generator=torch.Generator().manual_seed(2))
    backend = PagedSdpaBackend(block_size=block_size, num_kv_heads=num_kv_heads)
    output = backend.forward(layer, query, backend.prepare(batch))
    torch.testing.assert_close(output, expected_attention(batch, layer, query), atol=1e-5, rtol=0)


@pytest.mark.parametrize("block_size", [1, 16])
def test_rotated_keys_and_values_are_written_into_their_slots_and_nowhere_else(block_size: int) -> None:
    batch, num_blocks = make_batch(STEPS["mixed"], block_size)
    written = random_layer(num_blocks, 3, block_size, 8)
    expected = KVLayer(written.key.clone(), written.value.clone())
    generator = torch.Generator().manual_seed(3)
    query_key = torch.randn(len(batch.token_ids), 12, 8, generator=generator)
    value = torch.randn(len(batch.token_ids), 3, 8, generator=generator)
    rotation = random_rotation(len(batch.token_ids), 8)
    backend = PagedSdpaBackend(block_size=block_size, num_kv_heads=3)
    query = backend.write_kv(written, query_key, value, rotation, backend.prepare(batch))
    expected_query = reference.write_kv(
        query_key, value, rotation.cos, rotation.sin, expected.key, expected.value, batch.slot_mapping
    )
    assert torch.equal(query, expected_query)
    assert torch.equal(written.key, expected.key)
    assert torch.equal(written.value, expected.value)


def test_keys_and_values_are_read_as_they_are_stored() -> None:
    batch, num_blocks = make_batch([(40, 40)], 16)
    stored = random_layer(num_blocks, 2, 16, 64)
    layer = KVLayer(stored.key.half(), stored.value.half())
    generator = torch.Generator().manual_seed(4)
    query_key = torch.randn(40, 6, 64, generator=generator)
    value = torch.randn(40, 2, 64, generator=generator)
    backend = PagedSdpaBackend(block_size=16, num_kv_heads=2)
    metadata = backend.prepare(batch)
    query = backend.write_kv(layer, query_key, value, random_rotation(40, 64), metadata)
    output = backend.forward(layer, query, metadata)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected_attention(batch, layer, query), atol=1e-5, rtol=0)


def test_a_nan_reaches_no_row_but_the_one_that_holds_it() -> None:
    batch, num_blocks = make_batch([(1, 130), (1, 250), (1, 160), (5, 20), (1, 1)], 16, seed=1)
    layer = random_layer(num_blocks, 3, 16, 64)
    query = torch.randn(len(batch.token_ids), 9, 64, generator=torch.Generator().manual_seed(5))
    expected = expected_attention(batch, layer, query)
    blocks = [
        table[: -(-length // 16)] for table, length in zip(batch.block_tables, batch.context_lengths, strict=True)
    ]
    # Tables are padded with block 0, so its owner is the row that would spoil others.
    bad_row = next(row for row, own in enumerate(blocks) if 0 in own)
    layer.key[blocks[bad_row]] = torch.nan
    layer.value[blocks[bad_row]] = torch.nan
    backend = PagedSdpaBackend(block_size=16, num_kv_heads=3)
    output = backend.forward(layer, query, backend.prepare(batch))
    rows = zip(output.split(batch.query_lengths), expected.split(batch.query_lengths), strict=True)
    for row, (actual, wanted) in enumerate(rows):
        if row == bad_row:
            assert actual.isnan().all()
        else:
            torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=0)


def test_stale_slots_behind_the_context_do_not_matter() -> None:
    batch, num_blocks = make_batch([(1, 130), (1, 3), (4, 20)], 16)
    layer = random_layer(num_blocks, 1, 16, 64)
    query = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(6))
    expected = expected_attention(batch, layer, query)
    for row, context_length in enumerate(batch.context_lengths):
        last = batch.block_tables[row, (context_length - 1) // 16]
        layer.key[last, :, context_length % 16 :] = 1e4
        layer.value[last, :, context_length % 16 :] = 1e4
    backend = PagedSdpaBackend(block_size=16, num_kv_heads=1)
    output = backend.forward(layer, query, backend.prepare(batch))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_copies_read_every_source_before_any_destination_is_written() -> None:
    layers = [random_layer(6, 2, 4, 8) for _ in range(2)]
    expected = [KVLayer(layer.key.clone(), layer.value.clone()) for layer in layers]
    # A swap, a chain and a source used twice.
    sources, destinations = [0, 1, 2, 3, 3], [1, 0, 3, 4, 5]
    PagedSdpaBackend(block_size=4, num_kv_heads=2).copy_blocks(layers, sources, destinations)
    for layer, wanted in zip(layers, expected, strict=True):
        for cache, before in ((layer.key, wanted.key), (layer.value, wanted.value)):
            reference.copy_blocks(before, sources, destinations)
            assert torch.equal(cache, before)


def test_log_sum_exp_merges_attention_over_two_parts_of_a_context() -> None:
    batch, num_blocks = make_batch([(1, 32)], 16)
    layer = random_layer(num_blocks, 2, 16, 64)
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(8))
    whole = expected_attention(batch, layer, query)
    parts = [
        reference.paged_attention(query, layer.key, layer.value, table, [16], [1], 64**-0.5)
        for table in batch.block_tables.split(1, dim=1)
    ]
    shares = torch.stack([log_sum for _, log_sum in parts]).softmax(0)
    merged = sum(share.unsqueeze(-1) * output for share, (output, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=0)

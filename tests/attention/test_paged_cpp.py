import pytest
import torch

from radixserve.attention.backend import KVLayer
from radixserve.attention.paged_cpp import PagedCppBackend
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from tests.attention.test_paged_sdpa import STEPS, make_batch, random_layer, random_rotation

pytestmark = pytest.mark.usefixtures("cpp_kernels")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_equals_that_of_the_torch_backend(step: str, block_size: int, dtype: torch.dtype) -> None:
    batch, num_blocks = make_batch(STEPS[step], block_size)
    stored = random_layer(num_blocks, 3, block_size, 64)
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(len(batch.token_ids), 15, 64, generator=generator)
    rotation = random_rotation(len(batch.token_ids), 64)
    backends = (
        PagedCppBackend(num_heads=9, num_kv_heads=3, head_dim=64, block_size=block_size),
        PagedSdpaBackend(block_size=block_size, num_kv_heads=3),
    )
    results = []
    for backend in backends:
        layer = KVLayer(stored.key.to(dtype, copy=True), stored.value.to(dtype, copy=True))
        metadata = backend.prepare(batch)
        query = backend.write_kv(layer, qkv[:, :12], qkv[:, 12:], rotation, metadata)
        results.append((query, layer.key, layer.value, backend.forward(layer, query, metadata)))
    # A rotated key may be rounded to the neighbouring float16.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_copies_read_every_source_before_any_destination_is_written() -> None:
    layers = [random_layer(6, 2, 4, 8) for _ in range(2)]
    expected = [KVLayer(layer.key.clone(), layer.value.clone()) for layer in layers]
    sources, destinations = [0, 1, 2, 3, 3], [1, 0, 3, 4, 5]
    PagedCppBackend(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4).copy_blocks(layers, sources, destinations)
    PagedSdpaBackend(block_size=4, num_kv_heads=2).copy_blocks(expected, sources, destinations)
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer.key, wanted.key)
        assert torch.equal(layer.value, wanted.value)

from typing import NamedTuple

import pytest
import torch

from radixserve.kernels import reference
from radixserve.kernels.write_kv import write_kv

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
NUM_BLOCKS = 5


class Write(NamedTuple):
    """Arguments of write_kv. The caches hold NaN, so that a stray write shows and a stray read spoils something."""

    query_key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor


def random_write(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Write:
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    # Queries, keys and values of a token lie together, as a fused projection leaves them.
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 6.3
    num_blocks = max(NUM_BLOCKS, -(-num_tokens // block_size) + 1)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    num_rotated = num_heads + num_kv_heads
    return Write(
        qkv[:, :num_rotated],
        qkv[:, num_rotated:],
        angles.cos(),
        angles.sin(),
        torch.full(shape, torch.nan, dtype=cache_dtype or dtype),
        torch.full(shape, torch.nan, dtype=cache_dtype or dtype),
        torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
    )


def check_equals_the_reference(write: Write, tolerance: float) -> None:
    expected = write._replace(key_cache=write.key_cache.clone(), value_cache=write.value_cache.clone())
    query, expected_query = write_kv(*write), reference.write_kv(*expected)
    assert query.dtype == write.query_key.dtype
    torch.testing.assert_close(query, expected_query, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(write.key_cache, expected.key_cache, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(write.value_cache, expected.value_cache, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1)])
def test_writes_and_rotates_as_the_reference(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
) -> None:
    for num_tokens in (0, 1, 17):
        write = random_write(num_tokens, num_heads, num_kv_heads, head_dim, dtype=dtype)
        check_equals_the_reference(write, TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1), (16, 2), (15, 5)])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_writes_and_rotates_as_the_reference_in_every_shape(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    for num_tokens in (1, 15, 16, 130):
        write = random_write(num_tokens, num_heads, num_kv_heads, head_dim, block_size=block_size, dtype=dtype)
        check_equals_the_reference(write, TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [1, 24])
def test_blocks_may_have_any_size(block_size: int) -> None:
    check_equals_the_reference(random_write(7, 4, 2, 64, block_size=block_size), 1e-5)


def test_a_token_without_a_slot_is_rotated_and_not_written() -> None:
    write = random_write(5, 4, 2, 64)
    write.slot_mapping[[1, 4]] = -1
    check_equals_the_reference(write, 1e-5)
    write.slot_mapping[:] = -1
    write.key_cache.fill_(torch.nan)
    write.value_cache.fill_(torch.nan)
    write_kv(*write)
    assert write.key_cache.isnan().all()
    assert write.value_cache.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str
)
def test_the_cache_may_be_of_another_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check_equals_the_reference(random_write(9, 6, 2, 80, dtype=dtype, cache_dtype=cache_dtype), 2e-3)


def test_slots_may_be_32_bit_integers() -> None:
    write = random_write(9, 6, 2, 64)
    check_equals_the_reference(write._replace(slot_mapping=write.slot_mapping.int()), 1e-5)


def test_a_nan_stays_in_the_head_that_holds_it() -> None:
    write = random_write(3, 4, 2, 64)
    write.query_key[1, 5] = torch.nan
    query = write_kv(*write)
    assert query.isfinite().all()
    blocks, offsets = write.slot_mapping // 16, write.slot_mapping % 16
    keys = write.key_cache[blocks, :, offsets]  # [T, KV, D]
    assert keys[1, 1].isnan().all()
    keys[1, 1] = 0
    assert keys.isfinite().all()
    assert write.value_cache[blocks, :, offsets].isfinite().all()

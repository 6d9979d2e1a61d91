from typing import Any, NamedTuple

import pytest
import torch

from radixserve.kernels import reference
from radixserve.kernels.cpu.write_kv import write_kv

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


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
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    *,
    block_size: int = 16,
    cache_dtype: torch.dtype = torch.float32,
) -> Write:
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    # Queries, keys and values of a token lie together, as a fused projection leaves them.
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 6.3
    num_blocks = -(-num_tokens // block_size) + 5
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    num_rotated = num_heads + num_kv_heads
    return Write(
        qkv[:, :num_rotated],
        qkv[:, num_rotated:],
        angles.cos(),
        angles.sin(),
        torch.full(shape, torch.nan, dtype=cache_dtype),
        torch.full(shape, torch.nan, dtype=cache_dtype),
        torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens],
    )


def check_equals_the_reference(write: Write) -> None:
    expected = write._replace(key_cache=write.key_cache.clone(), value_cache=write.value_cache.clone())
    query, expected_query = write_kv(*write), reference.write_kv(*expected)
    tolerance = TOLERANCE[write.key_cache.dtype]
    torch.testing.assert_close(query, expected_query, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(write.key_cache, expected.key_cache, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(write.value_cache, expected.value_cache, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1)])
def test_rotates_and_writes_as_the_reference(
    cache_dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
) -> None:
    for num_tokens in (0, 1, 15, 16, 130):
        check_equals_the_reference(random_write(num_tokens, num_heads, num_kv_heads, head_dim, cache_dtype=cache_dtype))


@pytest.mark.parametrize("block_size", [1, 4, 24, 256])
def test_blocks_may_have_any_size(block_size: int) -> None:
    check_equals_the_reference(random_write(17, block_size=block_size))


def test_a_token_without_a_slot_is_rotated_and_not_written() -> None:
    write = random_write(5)
    write.slot_mapping[[1, 4]] = -1
    check_equals_the_reference(write)
    write.key_cache.fill_(torch.nan)
    write.value_cache.fill_(torch.nan)
    write_kv(*write._replace(slot_mapping=torch.full((5,), -1)))
    assert write.key_cache.isnan().all()
    assert write.value_cache.isnan().all()


def test_a_nan_stays_in_the_head_that_holds_it() -> None:
    write = random_write(3)
    write.query_key[1, 5] = torch.nan
    assert write_kv(*write).isfinite().all()
    blocks, offsets = write.slot_mapping // 16, write.slot_mapping % 16
    keys = write.key_cache[blocks, :, offsets]  # [T, KV, D]
    assert keys[1, 1].isnan().all()
    keys[1, 1] = 0
    assert keys.isfinite().all()
    assert write.value_cache[blocks, :, offsets].isfinite().all()


@pytest.mark.usefixtures("keeps_threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    write = random_write(300, 9, 3, cache_dtype=torch.float16)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        caches = [torch.zeros_like(write.key_cache), torch.zeros_like(write.value_cache)]
        results.append([write_kv(*write._replace(key_cache=caches[0], value_cache=caches[1])), *caches])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query_key": torch.zeros(3, 2, 64)}, "query_key"),
        ({"query_key": torch.zeros(3, 6, 32)}, "query_key"),
        ({"query_key": torch.zeros(3, 6, 128)[:, :, ::2]}, "contiguous"),
        ({"query_key": torch.zeros(3, 6, 64).half()}, "query_key is torch.float16"),
        ({"value": torch.zeros(4, 2, 64)}, "value"),
        ({"value": torch.zeros(3, 2, 64).half()}, "value is torch.float16"),
        ({"cos": torch.zeros(3, 64)}, "cos"),
        ({"sin": torch.zeros(2, 32)}, "sin"),
        ({"sin": torch.zeros(3, 64)[:, :32]}, "strides"),
        ({"value_cache": torch.zeros(4, 2, 16, 64)}, "value_cache"),
        ({"value_cache": torch.zeros(5, 2, 16, 64).half()}, "value_cache"),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(5, 2, 16, 60)), "multiples of 8"),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(5, 2, 64, 16).transpose(2, 3)), "contiguous"),
        (dict.fromkeys(("key_cache", "value_cache"), torch.zeros(5, 2, 16, 64, device="meta")), "on meta"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping is torch.int32"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)[::2]}, "contiguous"),
    ],
)
def test_write_kv_names_what_does_not_fit(changes: dict[str, torch.Tensor], named: str) -> None:
    arguments: dict[str, Any] = {
        "query_key": torch.zeros(3, 6, 64),
        "value": torch.zeros(3, 2, 64),
        "cos": torch.zeros(3, 32),
        "sin": torch.zeros(3, 32),
        "key_cache": torch.zeros(5, 2, 16, 64),
        "value_cache": torch.zeros(5, 2, 16, 64),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=named):
        write_kv(**arguments | changes)

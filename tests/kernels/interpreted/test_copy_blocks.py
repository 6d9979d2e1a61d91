import random

import pytest
import torch

from radixserve.kernels import reference
from radixserve.kernels.copy_blocks import copy_blocks

COPIES = {
    "one": ([3], [0]),
    "none": ([], []),
    "one source twice": ([2, 2, 5], [0, 4, 7]),
    "a swap": ([0, 1], [1, 0]),
    "a chain": ([0, 1, 2], [1, 2, 3]),
    "a chain, last first": ([2, 1, 0], [3, 2, 1]),
    "a cycle beside a fork": ([0, 1, 2, 2, 6], [1, 2, 0, 3, 5]),
    "onto itself": ([4, 1], [4, 2]),
}


def random_caches(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]


def check_equals_the_reference(caches: list[torch.Tensor], sources: list[int], destinations: list[int]) -> None:
    expected = [cache.clone() for cache in caches]
    copy_blocks(caches, sources, destinations)
    for cache, wanted in zip(caches, expected, strict=True):
        reference.copy_blocks(wanted, sources, destinations)
        torch.testing.assert_close(cache, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", COPIES)
def test_copies_read_every_source_before_any_destination_is_written(name: str) -> None:
    check_equals_the_reference(random_caches((8, 2, 4, 8)), *COPIES[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 1, 1, 2), (8, 3, 16, 80), (8, 1, 24, 128)])
def test_copies_blocks_of_every_dtype_and_size(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_equals_the_reference(random_caches(shape, dtype), [1, 2, 6], [2, 0, 7])


def test_copies_what_is_no_number() -> None:
    caches = random_caches((8, 2, 4, 8))
    caches[1][2] = torch.nan
    check_equals_the_reference(caches, [2, 1], [5, 3])


def test_random_copies_equal_the_reference() -> None:
    source = random.Random(7)
    caches = random_caches((16, 1, 4, 8))
    for _ in range(30):
        destinations = source.sample(range(16), source.randrange(1, 16))
        check_equals_the_reference(caches, [source.randrange(16) for _ in destinations], destinations)

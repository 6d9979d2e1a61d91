"""Rows over a paged cache in which every slot that no row may read holds NaN."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from radixserve.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@dataclass(frozen=True)
class Shape:
    """What the kernels specialise on, and how many K/V heads there are."""

    group_size: int
    head_dim: int
    dtype: torch.dtype
    block_size: int = 16
    num_kv_heads: int = 2

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"group{self.group_size}-head{self.head_dim}-{dtype}-block{self.block_size}"


def shapes() -> list[Any]:
    """Return parameters of a test: each pair of group size, head size and dtype, and the rest of the matrix as slow."""
    parameters = []
    groups, head_dims, dtypes = (1, 3, 4, 8), (64, 80, 96, 128), (torch.float32, torch.float16)
    for group_size, head_dim, dtype in itertools.product(groups, head_dims, dtypes):
        is_plain = head_dim <= 80 and (groups.index(group_size) + head_dim // 16 + dtypes.index(dtype)) % 2 == 0
        for block_size in (8, 16, 32):
            marks = () if is_plain and block_size == 16 else pytest.mark.slow
            shape = Shape(group_size, head_dim, dtype, block_size)
            parameters.append(pytest.param(shape, id=str(shape), marks=marks))
    return parameters


@dataclass(frozen=True)
class PagedRows:
    """Rows of query tokens, one after another, and the cache that holds their contexts."""

    shape: Shape
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_lengths: list[int]
    context_lengths: list[int]

    @property
    def starts(self) -> list[int]:
        """The first token of each row."""
        return list(itertools.accumulate(self.query_lengths, initial=0))[:-1]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reference's attention and log-sum-exp, in float32 of the stored numbers."""
        return reference.paged_attention(
            self.query.float(),
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.context_lengths,
            self.query_lengths,
            self.shape.scale,
        )

    def blocks_of(self, row: int) -> torch.Tensor:
        return self.block_tables[row, : -(-self.context_lengths[row] // self.shape.block_size)]


def make_rows(shape: Shape, rows: Sequence[tuple[int, int]], seed: int = 0) -> PagedRows:
    """Lay rows (query length, context length) out over shuffled blocks.

    Slots behind a context hold NaN, and so does all of block 0, which pads the tables.
    """
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-context // shape.block_size) for _, context in rows]
    blocks = list(range(1, sum(counts) + 1))
    source.shuffle(blocks)
    cache_shape = (len(blocks) + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    key_cache, value_cache = torch.full((2, *cache_shape), torch.nan, dtype=shape.dtype)
    block_tables = torch.zeros(len(rows), max(*counts, 1), dtype=torch.int64)
    for row, (_, context) in enumerate(rows):
        for index in range(counts[row]):
            block_tables[row, index] = block = blocks.pop()
            used = min(shape.block_size, context - index * shape.block_size)
            for cache in (key_cache, value_cache):
                cache[block, :, :used] = torch.randn(shape.num_kv_heads, used, shape.head_dim, generator=generator)
    num_tokens = sum(query for query, _ in rows)
    # Queries are the first heads of a fused projection, as the decoder hands them over.
    num_heads = shape.group_size * shape.num_kv_heads
    fused = torch.randn(num_tokens, num_heads + 2, shape.head_dim, generator=generator).to(shape.dtype)
    return PagedRows(
        shape=shape,
        query=fused[:, :num_heads],
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_lengths=[query for query, _ in rows],
        context_lengths=[context for _, context in rows],
    )


def assert_close(rows: PagedRows, output: torch.Tensor, log_sums: torch.Tensor) -> None:
    """Compare with the reference, log-sum-exps always to the tolerance of float32 sums."""
    expected, expected_sums = rows.expected()
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[rows.shape.dtype], rtol=0)
    torch.testing.assert_close(log_sums, expected_sums, atol=1e-5, rtol=1e-5)

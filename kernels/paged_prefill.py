"""Causal attention of rows of new tokens over their paged context, cached part and own tokens alike.

The new tokens' keys and values have been written to the cache before. Tokens and the query heads that share a K/V head
are packed into one tile, so that each key is read once for all of them.
Source: Dao et al. 2022 (FlashAttention), over the block table of Kwon et al. 2023 (PagedAttention).
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from radixserve.kernels.paged_tile import attend_tile, check_paged_arguments, finish_softmax
from radixserve.kernels.tiles import (
    DTYPES,
    FAMILIES,
    HEAD_DIMS,
    TRITON_NAMES,
    CompileCase,
    padded_head_dim,
    prefill_tiles,
    target_family,
)

_LOG2_E = math.log2(math.e)


@dataclass(slots=True, frozen=True)
class PrefillPlan:
    """Which program computes which tokens, the same for all layers of a step.

    tiles: [W, 4] int32, for each tile its row of the block tables, its first token, how many tokens it has, and the
    position of the first. tokens_per_tile: the most that a tile has.
    """

    tiles: torch.Tensor
    tokens_per_tile: int


def plan_prefill(
    table_rows: npt.ArrayLike,
    tokens: npt.ArrayLike,
    query_lengths: npt.ArrayLike,
    context_lengths: npt.ArrayLike,
    *,
    tokens_per_tile: int,
    device: torch.device,
) -> PrefillPlan:
    """Cut rows, at least one, into tiles of tokens_per_tile.

    table_rows, tokens, query_lengths, context_lengths: [R], where each row's block table and its first query are, how
    many queries it has, and how long its context is with them; the last query stands at the last position.
    """
    queries = np.asarray(query_lengths)
    num_tiles = -(-queries // tokens_per_tile)
    ends = num_tiles.cumsum()
    row_of_tile = np.repeat(np.arange(len(queries)), num_tiles)
    offsets = (np.arange(ends[-1]) - (ends - num_tiles)[row_of_tile]) * tokens_per_tile
    lines = [
        np.asarray(table_rows)[row_of_tile],
        np.asarray(tokens)[row_of_tile] + offsets,
        np.minimum(queries[row_of_tile] - offsets, tokens_per_tile),
        (np.asarray(context_lengths) - queries)[row_of_tile] + offsets,
    ]
    tiles = torch.from_numpy(np.stack(lines, axis=1).astype(np.int32)).to(device)
    return PrefillPlan(tiles=tiles, tokens_per_tile=tokens_per_tile)


def tokens_per_tile(head_dim: int, dtype: torch.dtype, group_size: int) -> int:
    """Return how many tokens a tile holds when group_size query heads share a K/V head, for plan_prefill."""
    return prefill_tiles(head_dim, dtype, target_family()).tile_queries // group_size


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: PrefillPlan,
    output: torch.Tensor,
    log_sums: torch.Tensor | None = None,
    *,
    scale: float,
) -> None:
    """Write attention of the plan's tokens over their contexts into output, and its log-sum-exp into log_sums.

    Shapes as check_paged_arguments says; tokens that are not in the plan are left as they are. A token that sees
    nothing gets zeros and -inf. Slots behind a row's context are never read. Accumulates in float32. Raises
    ValueError, also for a plan with larger tiles than the kernel's.
    """
    check_paged_arguments(query, key_cache, value_cache, block_tables, output, log_sums)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    tiles = prefill_tiles(head_dim, query.dtype, target_family())
    if plan.tokens_per_tile > tiles.tile_queries // group_size:
        raise ValueError(
            f"the plan has tiles of {plan.tokens_per_tile} tokens; at most {tiles.tile_queries // group_size} fit"
        )
    _prefill_tile[plan.tiles.shape[0], num_kv_heads](
        query,
        key_cache,
        value_cache,
        block_tables,
        plan.tiles,
        output,
        log_sums,
        query.stride(0),
        block_tables.stride(0),
        scale * _LOG2_E,
        GROUP_SIZE=group_size,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_TILE=padded_head_dim(head_dim),
        TILE_QUERIES=tiles.tile_queries,
        TILE_TOKENS=tiles.tile_tokens,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_tile(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale_log2: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    """Attend the query heads of one K/V head of a tile of tokens to all that they see. Grid: (tiles, num_kv_heads)."""
    tl.static_assert(GROUP_SIZE <= TILE_QUERIES, "a token's query heads must fit one tile")
    line = tiles + tl.program_id(0) * 4
    row, first_token = tl.load(line).to(tl.int64), tl.load(line + 1).to(tl.int64)
    num_tokens, first_position = tl.load(line + 2), tl.load(line + 3)
    dims = tl.arange(0, DIM_TILE)
    # Row i of the tile is query head i % GROUP_SIZE of token i // GROUP_SIZE.
    token_in_tile = tl.arange(0, TILE_QUERIES) // GROUP_SIZE
    heads = tl.program_id(1) * GROUP_SIZE + tl.arange(0, TILE_QUERIES) % GROUP_SIZE
    is_query = token_in_tile < num_tokens
    is_stored = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    # Only the first token's place needs 64 bits: the tile lies near it.
    places = (token_in_tile * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :]  # [TILE_QUERIES, DIM_TILE]
    queries = tl.load(query + first_token * query_stride + places, mask=is_stored, other=0.0)

    best = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    weighted = tl.zeros([TILE_QUERIES, DIM_TILE], tl.float32)
    last_visible = first_position + token_in_tile
    end = first_position + num_tokens
    block_table = block_tables + row * table_stride
    # Every token sees all up to the first one's position: whole tiles of that need no mask.
    unmasked_end = tl.maximum(first_position + 1, 0) // TILE_TOKENS * TILE_TOKENS
    for first in range(0, unmasked_end, TILE_TOKENS):
        best, total, weighted = attend_tile(
            queries,
            key_cache,
            value_cache,
            block_table,
            first,
            end,
            last_visible,
            scale_log2,
            best,
            total,
            weighted,
            BLOCK_SIZE,
            HEAD_DIM,
            TILE_TOKENS,
            IS_MASKED=False,
        )
    for first in range(unmasked_end, end, TILE_TOKENS):
        best, total, weighted = attend_tile(
            queries,
            key_cache,
            value_cache,
            block_table,
            first,
            end,
            last_visible,
            scale_log2,
            best,
            total,
            weighted,
            BLOCK_SIZE,
            HEAD_DIM,
            TILE_TOKENS,
            IS_MASKED=True,
        )
    attended, log_sum = finish_softmax(best, total, weighted)
    num_heads = tl.num_programs(1) * GROUP_SIZE
    results = token_in_tile * num_heads + heads
    result = output + first_token * num_heads * HEAD_DIM + (results * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(result, attended.to(output.dtype.element_ty), mask=is_stored)
    if log_sums is not None:
        tl.store(log_sums + first_token * num_heads + results, log_sum, mask=is_query)


def compile_cases() -> list[CompileCase]:
    """Return every entry of the table for each head size."""
    cases = []
    for family, dtype, head_dim in itertools.product(FAMILIES, DTYPES, HEAD_DIMS):
        tiles = prefill_tiles(head_dim, dtype, family)
        element = f"*{TRITON_NAMES[dtype]}"
        pointers = dict.fromkeys(("query", "key_cache", "value_cache"), element) | {
            "block_tables": "*i64",
            "tiles": "*i32",
            "output": element,
        }
        numbers = {"log_sums": "constexpr", "query_stride": "i32", "table_stride": "i32", "scale_log2": "fp32"}
        shape = {
            "GROUP_SIZE": 4,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "DIM_TILE": padded_head_dim(head_dim),
            "TILE_QUERIES": tiles.tile_queries,
            "TILE_TOKENS": tiles.tile_tokens,
        }
        cases.append(
            CompileCase(
                name=f"paged_prefill {TRITON_NAMES[dtype]} {head_dim}",
                family=family,
                fn=_prefill_tile,
                signature=pointers | numbers | dict.fromkeys(shape, "constexpr"),
                constexprs=shape | {"log_sums": None},
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                divisible_by_16=(*pointers, "query_stride"),
            )
        )
    return cases

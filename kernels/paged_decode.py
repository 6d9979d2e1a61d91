"""Attention of one new token a row over its paged context: split K/V, then a merge by log-sum-exp.

All query heads that share a K/V head are one tile, so each key is read once for them. A long context is cut into
splits that programs read side by side; a second kernel merges their partial results.
Source: Dao et al. 2023 (Flash-Decoding).
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
    decode_tiles,
    padded_head_dim,
    target_family,
)

# Splits that the merge reads at once: 16 of 128 float32 are 16 registers a thread.
_MERGED_SPLITS = 16
_MERGE_WARPS = 4
_LOG2_E = math.log2(math.e)


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """Which program reads what, the same for all layers of a step.

    splits: [S, 5] int32, for each split its query's token, its row of the block tables, its first context position,
    the position behind its last, and where its result goes: the token if no row is split, else the split itself.
    rows: [R, 3] int32, for each row its token, its first split and the split behind its last; None if no row is split.
    """

    splits: torch.Tensor
    rows: torch.Tensor | None


def plan_decode(
    table_rows: npt.ArrayLike,
    tokens: npt.ArrayLike,
    context_lengths: npt.ArrayLike,
    *,
    split_tokens: int,
    device: torch.device,
) -> DecodePlan:
    """Cut the contexts of rows, at least one, into splits of split_tokens; an empty context is one empty split.

    table_rows, tokens, context_lengths: [R], where each row's block table and its query are, and how long it is.
    """
    contexts = np.asarray(context_lengths)
    num_splits = np.maximum(1, -(-contexts // split_tokens))
    ends = num_splits.cumsum()
    row_of_split = np.repeat(np.arange(len(contexts)), num_splits)
    splits = np.arange(ends[-1])
    starts = (splits - (ends - num_splits)[row_of_split]) * split_tokens
    stops = np.minimum(starts + split_tokens, contexts[row_of_split])
    token_of_split = np.asarray(tokens)[row_of_split]
    is_split = len(splits) > len(contexts)
    targets = splits if is_split else token_of_split
    lines = [token_of_split, np.asarray(table_rows)[row_of_split], starts, stops, targets]
    rows = _to_device([np.asarray(tokens), ends - num_splits, ends], device) if is_split else None
    return DecodePlan(splits=_to_device(lines, device), rows=rows)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    output: torch.Tensor,
    log_sums: torch.Tensor | None = None,
    *,
    scale: float,
) -> None:
    """Write attention of the plan's tokens over their contexts into output, and its log-sum-exp into log_sums.

    Shapes as check_paged_arguments says; tokens that are not in the plan are left as they are. An empty context gives
    zeros and -inf. Slots behind a row's context are never read. Accumulates in float32. Raises ValueError.
    """
    check_paged_arguments(query, key_cache, value_cache, block_tables, output, log_sums)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_splits = plan.splits.shape[0]
    tiles = decode_tiles(head_dim, query.dtype, target_family())
    # Both kernels write [..., num_heads, head_dim]: the first into the output itself unless a row is split.
    partial, partial_sums = output, log_sums
    if plan.rows is not None:
        partial = query.new_empty((num_splits, num_heads, head_dim), dtype=torch.float32)
        partial_sums = query.new_empty((num_splits, num_heads), dtype=torch.float32)
    _decode_split[num_splits, num_kv_heads](
        query,
        key_cache,
        value_cache,
        block_tables,
        plan.splits,
        partial,
        partial_sums,
        query.stride(0),
        block_tables.stride(0),
        scale * _LOG2_E,
        GROUP_SIZE=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_TILE=padded_head_dim(head_dim),
        TILE_TOKENS=tiles.tile_tokens,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if plan.rows is not None:
        _merge_splits[plan.rows.shape[0], num_heads](
            partial,
            partial_sums,
            plan.rows,
            output,
            log_sums,
            HEAD_DIM=head_dim,
            DIM_TILE=padded_head_dim(head_dim),
            SPLIT_TILE=_MERGED_SPLITS,
            num_warps=_MERGE_WARPS,
        )


@triton.jit(do_not_specialize=["table_stride"])
def _decode_split(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    splits: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale_log2: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    """Attend the query heads of one K/V head to one split. Grid: (splits, num_kv_heads)."""
    HEAD_TILE: tl.constexpr = 16
    tl.static_assert(GROUP_SIZE <= HEAD_TILE, "the query heads of a K/V head must fit one tile")
    line = splits + tl.program_id(0) * 5
    token, row = tl.load(line).to(tl.int64), tl.load(line + 1).to(tl.int64)
    start, end, target = tl.load(line + 2), tl.load(line + 3), tl.load(line + 4).to(tl.int64)
    heads, dims = tl.arange(0, HEAD_TILE), tl.arange(0, DIM_TILE)
    first_head = tl.program_id(1) * GROUP_SIZE
    is_stored = (heads < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (first_head + heads)[:, None] * HEAD_DIM + dims[None, :]  # [HEAD_TILE, DIM_TILE]
    queries = tl.load(query + token * query_stride + places, mask=is_stored, other=0.0)

    best = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_TILE], tl.float32)
    weighted = tl.zeros([HEAD_TILE, DIM_TILE], tl.float32)
    last_visible = tl.zeros([HEAD_TILE], tl.int32) + end
    for first in range(start, end, TILE_TOKENS):
        best, total, weighted = attend_tile(
            queries,
            key_cache,
            value_cache,
            block_tables + row * table_stride,
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
    result = output + target * num_heads * HEAD_DIM + places
    tl.store(result, attended.to(output.dtype.element_ty), mask=is_stored)
    if log_sums is not None:
        tl.store(log_sums + target * num_heads + first_head + heads, log_sum, mask=heads < GROUP_SIZE)


@triton.jit
def _merge_splits(
    partial: tl.tensor,
    partial_sums: tl.tensor,
    rows: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
) -> None:
    """Average the splits of one row and head, weighted by exp of their log-sum-exp. Grid: (rows, num_heads)."""
    line = rows + tl.program_id(0) * 3
    token, start, end = tl.load(line).to(tl.int64), tl.load(line + 1), tl.load(line + 2)
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    dims = tl.arange(0, DIM_TILE)
    is_dim = dims < HEAD_DIM
    best, total = float("-inf"), 0.0
    weighted = tl.zeros([DIM_TILE], tl.float32)
    for first in range(start, end, SPLIT_TILE):
        splits = first + tl.arange(0, SPLIT_TILE)
        is_split = splits < end
        places = splits.to(tl.int64) * num_heads + head
        sums = tl.load(partial_sums + places, mask=is_split, other=float("-inf"))
        attended = tl.load(
            partial + places[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
        )
        new_best = tl.maximum(best, tl.max(sums, 0))
        # The one split of an empty context has -inf, and -inf - -inf would make it NaN.
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights, correction = tl.exp(sums - reference), tl.exp(best - reference)
        total = total * correction + tl.sum(weights, 0)
        weighted = weighted * correction + tl.sum(weights[:, None] * attended, 0)
        best = new_best
    divisor = tl.where(total == 0.0, 1.0, total)
    place = token * num_heads + head
    tl.store(output + place * HEAD_DIM + dims, (weighted / divisor).to(output.dtype.element_ty), mask=is_dim)
    if log_sums is not None:
        tl.store(log_sums + place, best + tl.log(divisor))


def compile_cases() -> list[CompileCase]:
    """Return every entry of the table for each head size: a split, a row that is one split, and the merge."""
    cases = []
    for family, dtype, head_dim in itertools.product(FAMILIES, DTYPES, HEAD_DIMS):
        tiles = decode_tiles(head_dim, dtype, family)
        element = f"*{TRITON_NAMES[dtype]}"
        pointers = dict.fromkeys(("query", "key_cache", "value_cache"), element) | {
            "block_tables": "*i64",
            "splits": "*i32",
        }
        numbers = {"query_stride": "i32", "table_stride": "i32", "scale_log2": "fp32"}
        shape = {
            "GROUP_SIZE": 4,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "DIM_TILE": padded_head_dim(head_dim),
            "TILE_TOKENS": tiles.tile_tokens,
        }
        for kind, results in (
            ("split", {"output": "*fp32", "log_sums": "*fp32"}),
            ("whole", {"output": element, "log_sums": "constexpr"}),
        ):
            cases.append(
                CompileCase(
                    name=f"paged_decode {kind} {TRITON_NAMES[dtype]} {head_dim}",
                    family=family,
                    fn=_decode_split,
                    signature=pointers | results | numbers | dict.fromkeys(shape, "constexpr"),
                    constexprs=shape | ({} if kind == "split" else {"log_sums": None}),
                    num_warps=tiles.num_warps,
                    num_stages=tiles.num_stages,
                    divisible_by_16=(*pointers, "output", "query_stride"),
                )
            )
        merge = {"HEAD_DIM": head_dim, "DIM_TILE": padded_head_dim(head_dim), "SPLIT_TILE": _MERGED_SPLITS}
        cases.append(
            CompileCase(
                name=f"paged_decode merge {TRITON_NAMES[dtype]} {head_dim}",
                family=family,
                fn=_merge_splits,
                signature={"partial": "*fp32", "partial_sums": "*fp32", "rows": "*i32", "output": element}
                | dict.fromkeys(("log_sums", *merge), "constexpr"),
                constexprs=merge | {"log_sums": None},
                num_warps=_MERGE_WARPS,
                num_stages=1,
                divisible_by_16=("partial", "partial_sums", "output"),
            )
        )
    return cases


def _to_device(columns: list[npt.NDArray[np.int64]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.int32)).to(device)

"""Attention of one new token a row over its paged context: split K/V, then a merge by log-sum-exp.

All query heads that share a K/V head are one tile, so each key is read once for them, and for several rows where these
share a whole split and a tile has room. A long context is cut into splits that programs read side by side; a second
kernel merges their partial results.
Source: Dao et al. 2023 (Flash-Decoding); Juravsky et al. 2024 (Hydragen), for rows that share a prefix.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from radixserve.kernels.paged_tile import attend_tile, check_paged_arguments, finish_softmax
from radixserve.kernels.shared_runs import SharedRun, find_shared_runs
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
# Queries of a tile, the least that tl.dot takes.
_QUERY_TILE = 16
_LOG2_E = math.log2(math.e)


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """Which program reads what, the same for all layers of a step.

    splits: [P, 5] int32, for each program its first member and how many it has, the row of the block tables that it
    reads, its first context position and the position behind its last.
    members: [M, 2] int32, for each of a program's rows the query's token and where its result goes: the token if no row
    is split, else one of num_partials places.
    rows: [R, 3] int32, for each row its token, its first place and the one behind its last; None if no row is split.
    """

    splits: torch.Tensor
    members: torch.Tensor
    num_partials: int
    rows: torch.Tensor | None


def find_decode_runs(
    block_tables: npt.NDArray[np.int64],
    context_lengths: npt.NDArray[np.int64],
    *,
    block_size: int,
    split_tokens: int,
    group_size: int,
) -> list[SharedRun]:
    """Return the runs of whole splits that rows share, for plan_decode; none if one row's heads fill a tile.

    A tile has the same size however many of its queries are taken, so the program of a split that rows share takes as
    long as that of one row's own, and there are fewer of them: sharing never costs a GPU anything.
    """
    if group_size * 2 > _QUERY_TILE:
        return []
    return find_shared_runs(
        block_tables,
        context_lengths - 1,
        block_size=block_size,
        multiple_of=split_tokens,
        end_worth_sharing=lambda _, __, end: end,
    )


def plan_decode(
    table_rows: npt.ArrayLike,
    tokens: npt.ArrayLike,
    context_lengths: npt.ArrayLike,
    *,
    split_tokens: int,
    device: torch.device,
    runs: Sequence[SharedRun] = (),
    group_size: int = _QUERY_TILE,
) -> DecodePlan:
    """Cut the contexts of rows, at least one, into splits of split_tokens; an empty context is one empty split.

    table_rows, tokens, context_lengths: [R], where each row's block table and its query are, and how long it is.
    runs: of whole splits, whose rows are places in these; a program reads one for as many as fit a tile with group_size
    query heads each.
    """
    contexts, tables = np.asarray(context_lengths), np.asarray(table_rows)
    num_splits = np.maximum(1, -(-contexts // split_tokens))
    ends = num_splits.cumsum()
    first_places = ends - num_splits
    row_of_split = np.repeat(np.arange(len(contexts)), num_splits)
    places = np.arange(ends[-1])
    starts = (places - first_places[row_of_split]) * split_tokens
    stops = np.minimum(starts + split_tokens, contexts[row_of_split])
    token_of_split = np.asarray(tokens)[row_of_split]
    is_split = len(places) > len(contexts)
    members = np.stack((token_of_split, places if is_split else token_of_split), axis=1)
    splits = np.stack((places, np.ones_like(places), tables[row_of_split], starts, stops), axis=1)
    is_own = np.ones(len(places), np.bool_)
    shared, member_places = [], [places]
    num_members, rows_per_tile = len(places), _QUERY_TILE // group_size
    for run in runs:
        for start in range(run.begin, run.end, split_tokens):
            theirs = first_places[run.rows] + start // split_tokens
            is_own[theirs] = False
            member_places.append(theirs)
            for first in range(0, len(theirs), rows_per_tile):
                count = min(rows_per_tile, len(theirs) - first)
                line = (num_members + first, count, tables[run.rows[first]], start, start + split_tokens)
                shared.append(line)
            num_members += len(theirs)
    if shared:
        splits = np.concatenate((np.array(shared), splits[is_own]))
        members = members[np.concatenate(member_places)]
    rows = np.stack((np.asarray(tokens), first_places, ends), axis=1)
    return DecodePlan(
        splits=_to_device(splits, device),
        members=_to_device(members, device),
        num_partials=len(places),
        rows=_to_device(rows, device) if is_split else None,
    )


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
    tiles = decode_tiles(head_dim, query.dtype, target_family())
    # Both kernels write [..., num_heads, head_dim]: the first into the output itself unless a row is split.
    partial, partial_sums = output, log_sums
    if plan.rows is not None:
        partial = query.new_empty((plan.num_partials, num_heads, head_dim), dtype=torch.float32)
        partial_sums = query.new_empty((plan.num_partials, num_heads), dtype=torch.float32)
    _decode_split[plan.splits.shape[0], num_kv_heads](
        query,
        key_cache,
        value_cache,
        block_tables,
        plan.splits,
        plan.members,
        partial,
        partial_sums,
        query.stride(0),
        block_tables.stride(0),
        scale * _LOG2_E,
        GROUP_SIZE=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_TILE=padded_head_dim(head_dim),
        QUERY_TILE=_QUERY_TILE,
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
    members: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale_log2: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    """Attend the query heads of one K/V head, of all members, to one split. Grid: (programs, num_kv_heads)."""
    tl.static_assert(GROUP_SIZE <= QUERY_TILE, "the query heads of a K/V head must fit one tile")
    line = splits + tl.program_id(0) * 5
    first_member, num_members = tl.load(line), tl.load(line + 1)
    row, start, end = tl.load(line + 2).to(tl.int64), tl.load(line + 3), tl.load(line + 4)
    queries, dims = tl.arange(0, QUERY_TILE), tl.arange(0, DIM_TILE)
    # Queries past the last member's keep to its numbers and are not stored.
    is_query = queries < num_members * GROUP_SIZE
    member = members + 2 * (first_member + tl.minimum(queries // GROUP_SIZE, num_members - 1))
    token, target = tl.load(member).to(tl.int64), tl.load(member + 1).to(tl.int64)  # [QUERY_TILE]
    head = tl.program_id(1) * GROUP_SIZE + queries % GROUP_SIZE
    is_stored = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    places = token * query_stride + head * HEAD_DIM
    query_tile = tl.load(query + places[:, None] + dims[None, :], mask=is_stored, other=0.0)  # [QUERY_TILE, DIM_TILE]

    best = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    weighted = tl.zeros([QUERY_TILE, DIM_TILE], tl.float32)
    last_visible = tl.zeros([QUERY_TILE], tl.int32) + end
    for first in range(start, end, TILE_TOKENS):
        best, total, weighted = attend_tile(
            query_tile,
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
    results = target * tl.num_programs(1) * GROUP_SIZE + head
    result = output + results[:, None] * HEAD_DIM + dims[None, :]
    tl.store(result, attended.to(output.dtype.element_ty), mask=is_stored)
    if log_sums is not None:
        tl.store(log_sums + results, log_sum, mask=is_query)


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
            "members": "*i32",
        }
        numbers = {"query_stride": "i32", "table_stride": "i32", "scale_log2": "fp32"}
        shape = {
            "GROUP_SIZE": 4,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "DIM_TILE": padded_head_dim(head_dim),
            "QUERY_TILE": _QUERY_TILE,
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


def _to_device(lines: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(lines.astype(np.int32)).to(device)

"""Causal attention over the paged K/V cache on a CPU, for rows of one new token and of several."""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixserve.kernels.cpu.kv_cache import check_cache
from radixserve.kernels.cpu.library import library

# Query vectors, of all heads that share a K/V head, that read a chunk of keys once it is unpacked: about six times what
# unpacking costs is then done with it, and queries, sums and chunk stay in the second-level cache.
_TILE_QUERIES = 96
# Keys that one task reads for a row of one token: so that two threads share a single row, and merging costs little.
_DECODE_SPLIT = 512
# The same for a few tokens on a long context. A row of more tiles than this has tasks enough without splits, and would
# need much memory for them.
_PREFILL_SPLIT = 2048
_MAX_SPLIT_TILES = 2
_WHOLE = 2**62


class _Plan(Structure):
    """Plan of attention.h."""

    _fields_ = (
        ("tiles", c_void_p),
        ("tasks", c_void_p),
        ("block_tables", c_void_p),
        ("workspace", c_void_p),
        ("num_tiles", c_int64),
        ("num_tasks", c_int64),
        ("table_stride", c_int64),
    )


class _Layer(Structure):
    """Layer of attention.h."""

    _fields_ = (
        ("query", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key", c_void_p),
        ("value", c_void_p),
        ("block_stride", c_int64),
        ("kv_head_stride", c_int64),
        ("slot_stride", c_int64),
        ("num_kv_heads", c_int64),
        ("group_size", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("output", c_void_p),
        ("log_sums", c_void_p),
        ("scale", c_float),
    )


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """How a step's rows are cut into tasks; the same for all its layers.

    num_tokens: of all rows. query_shape: [num_heads, head_dim]. cut: the C++ struct, whose addresses are those of kept.
    """

    num_tokens: int
    query_shape: tuple[int, int]
    num_kv_heads: int
    num_tasks: int
    cut: _Plan
    kept: tuple[NDArray[np.int64] | torch.Tensor, ...]


def plan_attention(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> AttentionPlan:
    """Cut rows of query tokens, which follow one another, into tasks.

    context_lengths: keys of each row, those of its queries at their end; block_tables [R, max_blocks] names their
    blocks. A row's tasks depend on that row alone. Allocates the memory of the splits' partial results.
    Raises ValueError if the shapes disagree.
    """
    num_rows = len(query_lengths)
    if len(context_lengths) != num_rows or block_tables.dim() != 2 or block_tables.shape[0] < num_rows:
        raise ValueError(
            f"{num_rows} query lengths, {len(context_lengths)} context lengths and block_tables "
            f"{list(block_tables.shape)}; they must be of the same rows"
        )
    if block_tables.dtype != torch.int64 or not block_tables.is_cpu or block_tables.stride(1) != 1:
        raise ValueError("block_tables must be int64, on the CPU and contiguous in the last axis")
    group_size, rest = divmod(num_heads, num_kv_heads)
    if rest:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} K/V heads evenly")
    queries, contexts = np.asarray(query_lengths, np.int64), np.asarray(context_lengths, np.int64)
    tiles = _cut_into_tiles(queries, contexts, tokens_per_tile=max(1, _TILE_QUERIES // group_size))
    num_tokens, num_splits = tiles[:, 2], tiles[:, 5]
    # Sums, maximum and weight of each query, as Partial of attention.h.
    sizes = np.where(num_splits > 1, num_splits * num_tokens * num_heads * (head_dim + 2), 0)
    tiles[:, 6] = sizes.cumsum() - sizes
    tasks = _cut_into_tasks(tiles, num_kv_heads)
    workspace = torch.empty(int(sizes.sum()), dtype=torch.float32)
    return AttentionPlan(
        num_tokens=int(queries.sum()),
        query_shape=(num_heads, head_dim),
        num_kv_heads=num_kv_heads,
        num_tasks=len(tasks),
        cut=_Plan(
            tiles.ctypes.data,
            tasks.ctypes.data,
            block_tables.data_ptr(),
            workspace.data_ptr(),
            len(tiles),
            len(tasks),
            block_tables.stride(0),
        ),
        kept=(tiles, tasks, block_tables, workspace),
    )


def _cut_into_tiles(
    queries: NDArray[np.int64], contexts: NDArray[np.int64], *, tokens_per_tile: int
) -> NDArray[np.int64]:
    """Return [num_tiles, 7], the fields of Tile in attention.h; the last one is still to be filled in."""
    num_tiles = -(-queries // tokens_per_tile)
    rows = np.repeat(np.arange(len(queries)), num_tiles)
    skipped = _ranks(num_tiles) * tokens_per_tile  # tokens of the row before the tile
    tiles = np.zeros((len(rows), 7), np.int64)
    tiles[:, 0] = rows
    tiles[:, 1] = (queries.cumsum() - queries)[rows] + skipped
    tiles[:, 2] = np.minimum(queries[rows] - skipped, tokens_per_tile)
    tiles[:, 3] = (contexts - queries)[rows] + skipped + 1
    split = np.where(num_tiles > _MAX_SPLIT_TILES, _WHOLE, _PREFILL_SPLIT)
    tiles[:, 4] = np.where(queries == 1, _DECODE_SPLIT, split)[rows]
    visible_to_last = tiles[:, 3] + tiles[:, 2] - 1
    tiles[:, 5] = np.maximum(1, -(-visible_to_last // tiles[:, 4]))
    return tiles


def _cut_into_tasks(tiles: NDArray[np.int64], num_kv_heads: int) -> NDArray[np.int64]:
    """Return [num_tasks, 3], the fields of Task in attention.h, the longest first so that threads end together."""
    work = tiles[:, 2] * np.minimum(tiles[:, 3] + tiles[:, 2], tiles[:, 4])
    order = np.argsort(-work, kind="stable")
    num_splits = tiles[order, 5]
    tasks = np.empty((int(num_splits.sum()) * num_kv_heads, 3), np.int64)
    tasks[:, 0] = np.repeat(order, num_splits * num_kv_heads)
    tasks[:, 1], tasks[:, 2] = np.divmod(
        _ranks(num_splits * num_kv_heads), np.repeat(num_splits, num_splits * num_kv_heads)
    )
    return tasks


def _ranks(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, ... for each of the counts, one after another."""
    ends = counts.cumsum()
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    log_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of the plan's rows over their whole contexts, and write its log-sum-exp if asked for.

    query: [T, num_heads, head_dim] float32, contiguous in the last axis. key_cache, value_cache: [num_blocks,
    num_kv_heads, block_size, head_dim], float32 or float16, alike in their strides, contiguous in the last axis.
    log_sums: [T, num_heads] float32, contiguous, changed in place. Slots that no row's context reaches are not read.
    A query that sees nothing gets zeros and -inf. Sums are float32; a row's numbers depend neither on the other rows
    nor on the number of threads, which is torch's.
    Returns [T, num_heads, head_dim], contiguous. Raises ValueError if shapes, dtypes or strides disagree; blocks beyond
    the cache are the caller's fault and not looked for.
    Source: Kwon et al. 2023 (PagedAttention), section 4.3; Milakov and Gimelshein 2018 (online softmax).
    """
    check_cache(key_cache, value_cache)
    num_heads, head_dim = plan.query_shape
    if query.shape != (plan.num_tokens, num_heads, head_dim) or query.dtype != torch.float32 or query.stride(-1) != 1:
        raise ValueError(
            f"query is {query.dtype} {list(query.shape)} with strides {query.stride()}; it must be float32 "
            f"{[plan.num_tokens, num_heads, head_dim]}, contiguous in the last axis"
        )
    _, num_kv_heads, block_size, stored_dim = key_cache.shape
    if num_kv_heads != plan.num_kv_heads or stored_dim != head_dim:
        raise ValueError(f"the caches are {list(key_cache.shape)}, planned for {plan.num_kv_heads} heads of {head_dim}")
    output = torch.empty((plan.num_tokens, num_heads, head_dim), dtype=torch.float32)
    if log_sums is not None and (
        log_sums.shape != output.shape[:2] or log_sums.dtype != torch.float32 or not log_sums.is_contiguous()
    ):
        raise ValueError(
            f"log_sums is {log_sums.dtype} {list(log_sums.shape)}; it must be float32 {list(output.shape[:2])}, "
            "contiguous"
        )
    layer = _Layer(
        query.data_ptr(),
        *query.stride()[:2],
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *key_cache.stride()[:3],
        num_kv_heads,
        num_heads // num_kv_heads,
        head_dim,
        block_size,
        output.data_ptr(),
        None if log_sums is None else log_sums.data_ptr(),
        scale,
    )
    num_threads = max(1, min(torch.get_num_threads(), plan.num_tasks))
    is_half = key_cache.dtype == torch.float16
    if library().radixserve_paged_attention(addressof(plan.cut), addressof(layer), is_half, num_threads):
        raise MemoryError("no memory for attention")
    return output

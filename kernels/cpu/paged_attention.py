"""Causal attention over the paged K/V cache on a CPU, for rows of one new token and of several."""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from radixserve.kernels.cpu.attention_tasks import TILE_QUERIES, cut_into_tasks, cut_into_tiles, find_runs_of_tiles
from radixserve.kernels.cpu.kv_cache import check_cache
from radixserve.kernels.cpu.library import library


class _Plan(Structure):
    """Plan of attention.h."""

    _fields_ = (
        ("tiles", c_void_p),
        ("tasks", c_void_p),
        ("members", c_void_p),
        ("phase_ends", c_void_p),
        ("block_tables", c_void_p),
        ("workspace", c_void_p),
        ("num_tiles", c_int64),
        ("num_phases", c_int64),
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
        ("lanes", c_int32),
    )


@dataclass(slots=True, frozen=True)
class AttentionPlan:
    """How a step's rows are cut into tasks; the same for all its layers.

    num_tokens: of all rows. query_shape: [num_heads, head_dim]. tasks: [num_tasks, 5], as Task of attention.h. cut: the
    C++ struct, whose addresses are those of tasks and of kept.
    """

    num_tokens: int
    query_shape: tuple[int, int]
    num_kv_heads: int
    tasks: NDArray[np.int64]
    cut: _Plan
    kept: tuple[NDArray[np.int64] | torch.Tensor, ...]

    @property
    def num_keys_read(self) -> int:
        """How many keys the tasks of a layer read, each of one K/V head."""
        return int((self.tasks[:, 2] - self.tasks[:, 1]).sum())


def plan_attention(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int | None = None,
) -> AttentionPlan:
    """Cut rows of query tokens, which follow one another, into tasks.

    context_lengths: keys of each row, those of its queries at their end; block_tables [R, max_blocks] names their
    blocks. block_size: if given, blocks with which several rows begin are read once for them, which changes no bit of
    a row's numbers. Allocates the memory of the splits' partial results. Raises ValueError if the shapes disagree.
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
    tiles = cut_into_tiles(queries, contexts, tokens_per_tile=max(1, TILE_QUERIES // group_size))
    runs = []
    if block_size is not None:
        runs = find_runs_of_tiles(tiles, block_tables.numpy(), block_size=block_size, group_size=group_size)
    cut = cut_into_tasks(tiles, runs, num_kv_heads=num_kv_heads, group_size=group_size)
    # Sums, maximum and weight of each query, as Partial of attention.h.
    sizes = tiles[:, 6] * (head_dim + 2)
    tiles[:, 6] = np.where(sizes > 0, sizes.cumsum() - sizes, -1)
    workspace = torch.empty(int(sizes.sum()), dtype=torch.float32)
    return AttentionPlan(
        num_tokens=int(queries.sum()),
        query_shape=(num_heads, head_dim),
        num_kv_heads=num_kv_heads,
        tasks=cut.tasks,
        cut=_Plan(
            tiles.ctypes.data,
            cut.tasks.ctypes.data,
            cut.members.ctypes.data,
            cut.phase_ends.ctypes.data,
            block_tables.data_ptr(),
            workspace.data_ptr(),
            len(tiles),
            len(cut.phase_ends),
            block_tables.stride(0),
        ),
        kept=(tiles, cut.members, cut.phase_ends, block_tables, workspace),
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    log_sums: torch.Tensor | None = None,
    lanes: Literal[0, 8] = 0,
) -> torch.Tensor:
    """Return causal attention of the plan's rows over their whole contexts, and write its log-sum-exp if asked for.

    query: [T, num_heads, head_dim] float32, contiguous in the last axis. key_cache, value_cache: [num_blocks,
    num_kv_heads, block_size, head_dim], float32 or float16, alike in their strides, contiguous in the last axis.
    log_sums: [T, num_heads] float32, contiguous, changed in place. Slots that no row's context reaches are not read.
    lanes: 8 computes in AVX2, 0 in AVX-512 too where that can be: the bits are the same.
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
        lanes,
    )
    num_threads = max(1, min(torch.get_num_threads(), len(plan.tasks)))
    is_half = key_cache.dtype == torch.float16
    if library().radixserve_paged_attention(addressof(plan.cut), addressof(layer), is_half, num_threads):
        raise MemoryError("no memory for attention")
    return output

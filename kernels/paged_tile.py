"""What paged decode and paged prefill share: one tile of queries against one tile of a paged context."""

import torch
import triton
import triton.language as tl

from radixserve.kernels.tiles import MAX_GROUP_SIZE, check_supported


@triton.jit
def attend_tile(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    last_visible: tl.tensor,
    scale_log2: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add context positions first to first + TILE_TOKENS to a running softmax; return best, total and weighted.

    query: [M, D], zero beyond HEAD_DIM. block_table: the row's own. last_visible: [M], the last position that each
    query sees. Positions from end on are never read: their slots may hold anything, NaN too. Without IS_MASKED all
    positions are below end and visible. best: [M], the highest score so far, in powers of two; total: [M], the sum of
    exp2(score - best); weighted: [M, D], the values by the same weights.
    Source: Dao et al. 2022 (FlashAttention), algorithm 1.
    """
    tl.static_assert(query.shape[0] >= 16, "tl.dot takes at least 16 rows")
    tl.static_assert(TILE_TOKENS >= 16, "tl.dot takes at least 16 columns")
    tl.static_assert(query.shape[1] >= HEAD_DIM, "a head must fit its tile")
    num_kv_heads = tl.num_programs(1)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, query.shape[1])
    positions = first + tl.arange(0, TILE_TOKENS)
    if IS_MASKED:
        is_token = positions < end
        blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        is_loaded = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        blocks = tl.load(block_table + positions // BLOCK_SIZE).to(tl.int64)
        is_loaded = (dims < HEAD_DIM)[None, :]
    slots = ((blocks * num_kv_heads + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE) * HEAD_DIM
    places = slots[:, None] + dims[None, :]  # [N, D]

    key = tl.load(key_cache + places, mask=is_loaded, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2  # [M, N]
    if IS_MASKED:
        is_visible = is_token[None, :] & (positions[None, :] <= last_visible[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A query that has seen nothing has -inf here, and -inf - -inf would make it NaN.
    reference = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - reference[:, None])
    correction = tl.exp2(best - reference)
    total = total * correction + tl.sum(weights, 1)
    value = tl.load(value_cache + places, mask=is_loaded, other=0.0)
    weighted = tl.dot(weights.to(value.dtype), value, weighted * correction[:, None], input_precision="ieee")
    return new_best, total, weighted


@triton.jit
def finish_softmax(best: tl.tensor, total: tl.tensor, weighted: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the attention [M, D] and the natural log-sum-exp [M] of a running softmax, zeros and -inf if empty."""
    LN_2: tl.constexpr = 0.6931471805599453
    divisor = tl.where(total == 0.0, 1.0, total)
    return weighted / divisor[:, None], (best + tl.log2(divisor)) * LN_2


def check_paged_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor | None,
) -> None:
    """Raise ValueError unless these are what both kernels take.

    query: [T, num_heads, head_dim], contiguous in its last two axes. key_cache, value_cache: contiguous [num_blocks,
    num_kv_heads, block_size, head_dim]. block_tables: [R, max_blocks] int32 or int64, contiguous in its last axis.
    output: contiguous, like query. log_sums: None, or contiguous [T, num_heads] float32.
    """
    if query.dim() != 3 or key_cache.dim() != 4 or block_tables.dim() != 2:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key_cache, block_tables))
        raise ValueError(f"query, key_cache and block_tables are {shapes}; they must have 3, 4 and 2 axes")
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[1]
    check_supported(head_dim, query.dtype)
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_dim:
        raise ValueError(
            f"key_cache {list(key_cache.shape)} and value_cache {list(value_cache.shape)} must be alike, with heads of "
            f"{head_dim} elements as query has"
        )
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP_SIZE:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} K/V heads: each K/V head must serve the same number, at most "
            f"{MAX_GROUP_SIZE}"
        )
    if output.shape != query.shape:
        raise ValueError(f"output is {list(output.shape)}; it must be {list(query.shape)} as query is")
    if log_sums is not None and (log_sums.shape != query.shape[:2] or log_sums.dtype != torch.float32):
        raise ValueError(f"log_sums is {list(log_sums.shape)}, {log_sums.dtype}; it must be [T, num_heads] float32")
    if not query.dtype == key_cache.dtype == value_cache.dtype == output.dtype:
        raise ValueError(
            f"query, key_cache, value_cache and output are {query.dtype}, {key_cache.dtype}, {value_cache.dtype} and "
            f"{output.dtype}; they must have one dtype"
        )
    if block_tables.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"block_tables is {block_tables.dtype}; it must be int32 or int64")
    if query.stride()[1:] != (head_dim, 1) or block_tables.stride(1) != 1:
        raise ValueError("query must be contiguous in its last two axes and block_tables in its last")
    tensors = [key_cache, value_cache, output] + ([] if log_sums is None else [log_sums])
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("key_cache, value_cache, output and log_sums must be contiguous")
    if any(tensor.device != query.device for tensor in [*tensors, block_tables]):
        raise ValueError("all tensors must be on one device")

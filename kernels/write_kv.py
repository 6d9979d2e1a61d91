"""Rotate queries and keys, and store keys and values, in one pass over the fused projection."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from radixserve.kernels.tiles import DTYPES, FAMILIES, HEAD_DIMS, TRITON_NAMES, CompileCase, check_supported

# Heads of one token that a program takes, so that their cos and sin are read once.
_TILE_HEADS = 8
_NUM_WARPS = 2


@triton.jit
def write_kv_kernel(
    query_key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    query_key_token_stride: tl.tensor,
    query_key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    angle_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Take TILE_HEADS heads of one token: those of queries and keys first, then those of values.

    BLOCK: a power of two, not less than HEAD_DIM / 2.
    """
    tl.static_assert(HEAD_DIM % 2 == 0, "a head is rotated in pairs")
    HALF: tl.constexpr = HEAD_DIM // 2
    tl.static_assert(BLOCK >= HALF, "half a head must fit its tile")
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    pairs = tl.arange(0, BLOCK)
    num_rotated = num_heads + num_kv_heads
    # Of a token without a slot no K/V head is written.
    num_written = tl.where(slot < 0, 0, num_kv_heads)
    num_rotated_tiles = tl.cdiv(num_rotated, TILE_HEADS)
    if tile < num_rotated_tiles:
        heads = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        is_in = (heads < num_rotated)[:, None] & (pairs < HALF)[None, :]  # [TILE_HEADS, BLOCK]
        turn_cos = tl.load(cos + token * angle_stride + pairs, mask=pairs < HALF, other=1.0).to(tl.float32)[None, :]
        turn_sin = tl.load(sin + token * angle_stride + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
        read = query_key + token * query_key_token_stride + heads[:, None] * query_key_head_stride + pairs[None, :]
        first = tl.load(read, mask=is_in, other=0.0).to(tl.float32)
        second = tl.load(read + HALF, mask=is_in, other=0.0).to(tl.float32)
        rotated_first = first * turn_cos - second * turn_sin
        rotated_second = second * turn_cos + first * turn_sin

        is_query = is_in & (heads < num_heads)[:, None]
        written = query + (token * num_heads + heads[:, None]) * HEAD_DIM + pairs[None, :]
        tl.store(written, rotated_first.to(query.dtype.element_ty), mask=is_query)
        tl.store(written + HALF, rotated_second.to(query.dtype.element_ty), mask=is_query)

        kv_heads = heads - num_heads
        is_key = is_in & ((kv_heads >= 0) & (kv_heads < num_written))[:, None]
        places = (((block * num_kv_heads + kv_heads) * BLOCK_SIZE + offset) * HEAD_DIM)[:, None] + pairs[None, :]
        tl.store(key_cache + places, rotated_first.to(key_cache.dtype.element_ty), mask=is_key)
        tl.store(key_cache + places + HALF, rotated_second.to(key_cache.dtype.element_ty), mask=is_key)
    else:
        value_heads = (tile - num_rotated_tiles) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        is_value = (value_heads < num_written)[:, None] & (pairs < HALF)[None, :]
        value_read = value + token * value_token_stride + value_heads[:, None] * value_head_stride + pairs[None, :]
        value_places = (((block * num_kv_heads + value_heads) * BLOCK_SIZE + offset) * HEAD_DIM)[:, None] + pairs[
            None, :
        ]
        value_first = tl.load(value_read, mask=is_value, other=0.0)
        value_second = tl.load(value_read + HALF, mask=is_value, other=0.0)
        tl.store(value_cache + value_places, value_first.to(value_cache.dtype.element_ty), mask=is_value)
        tl.store(value_cache + value_places + HALF, value_second.to(value_cache.dtype.element_ty), mask=is_value)


def write_kv(
    query_key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their slots in place, and return the rotated queries.

    query_key: [T, num_heads + num_kv_heads, head_dim], the heads of the queries first. value: [T, num_kv_heads,
    head_dim]. Both of one dtype and contiguous in the last axis, so views of the fused projection will do.
    cos, sin: [T, head_dim / 2], alike and contiguous in the last axis. key_cache, value_cache: [num_blocks,
    num_kv_heads, block_size, head_dim], contiguous, of one dtype, which may be another than the activations'.
    slot_mapping: contiguous [T] int32 or int64, block_id * block_size + offset, no slot twice; -1 writes nothing.
    Element i turns with element i + head_dim / 2, in float32; a result is rounded once, to the dtype it is stored in.
    Returns [T, num_heads, head_dim], contiguous, in query_key's dtype. Raises ValueError if shapes, dtypes, strides or
    devices disagree; slots beyond the cache are the caller's fault and not looked for.
    Source: Su et al. 2021 (RoFormer), section 3.2.2; Kwon et al. 2023 (PagedAttention), section 4.3.
    """
    _check_activations(query_key, value, cos, sin)
    _check_caches(query_key, value, key_cache, value_cache, slot_mapping)
    devices = {str(tensor.device) for tensor in (query_key, value, cos, sin, key_cache, value_cache, slot_mapping)}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {', '.join(sorted(devices))}; they must be on one device")
    num_tokens, num_rotated, head_dim = query_key.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_heads = num_rotated - num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=query_key.dtype, device=query_key.device)
    if num_tokens:
        num_tiles = triton.cdiv(num_rotated, _TILE_HEADS) + triton.cdiv(num_kv_heads, _TILE_HEADS)
        write_kv_kernel[(num_tokens, num_tiles)](
            query_key,
            value,
            cos,
            sin,
            query,
            key_cache,
            value_cache,
            slot_mapping,
            num_heads,
            num_kv_heads,
            query_key.stride(0),
            query_key.stride(1),
            value.stride(0),
            value.stride(1),
            cos.stride(0),
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            TILE_HEADS=_TILE_HEADS,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=_NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return query


def compile_cases() -> Iterator[CompileCase]:
    """Yield the kernel for every head size and dtype, K/V stored as they are, and with float16 K/V of float32."""
    stored_as = [(dtype, dtype) for dtype in DTYPES] + [(torch.float32, torch.float16)]
    for family in FAMILIES:
        for head_dim in HEAD_DIMS:
            for dtype, cache_dtype in stored_as:
                activation, cache = f"*{TRITON_NAMES[dtype]}", f"*{TRITON_NAMES[cache_dtype]}"
                constexprs = {
                    "BLOCK_SIZE": 16,
                    "HEAD_DIM": head_dim,
                    "TILE_HEADS": _TILE_HEADS,
                    "BLOCK": triton.next_power_of_2(head_dim // 2),
                }
                tensors = {
                    "query_key": activation,
                    "value": activation,
                    "cos": "*fp32",
                    "sin": "*fp32",
                    "query": activation,
                    "key_cache": cache,
                    "value_cache": cache,
                    "slot_mapping": "*i64",
                }
                strides = {
                    "query_key_token_stride": "i32",
                    "query_key_head_stride": "i32",
                    "value_token_stride": "i32",
                    "value_head_stride": "i32",
                }
                yield CompileCase(
                    name=f"write_kv {TRITON_NAMES[dtype]} to {TRITON_NAMES[cache_dtype]} d{head_dim}",
                    family=family,
                    fn=write_kv_kernel,
                    signature=tensors
                    | {"num_heads": "i32", "num_kv_heads": "i32"}
                    | strides
                    | {"angle_stride": "i32"}
                    | dict.fromkeys(constexprs, "constexpr"),
                    constexprs=constexprs,
                    num_warps=_NUM_WARPS,
                    num_stages=1,
                    divisible_by_16=(*tensors, *strides),
                )


def _check_activations(query_key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if query_key.dim() != 3 or value.dim() != 3:
        raise ValueError(
            f"query_key is {list(query_key.shape)} and value {list(value.shape)}; both must be [T, heads, head_dim]"
        )
    num_tokens, _, head_dim = query_key.shape
    check_supported(head_dim, query_key.dtype)
    if value.shape[0] != num_tokens or value.shape[2] != head_dim or value.dtype != query_key.dtype:
        raise ValueError(
            f"query_key is {query_key.dtype} {list(query_key.shape)}, value {value.dtype} {list(value.shape)}; they "
            "must agree in dtype, tokens and head_dim"
        )
    if any(angles.shape != (num_tokens, head_dim // 2) for angles in (cos, sin)) or cos.stride() != sin.stride():
        raise ValueError(
            f"cos is {list(cos.shape)}, sin {list(sin.shape)}; both must be {[num_tokens, head_dim // 2]}, of equal "
            "strides"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query_key, value, cos)):
        raise ValueError("query_key, value, cos and sin must be contiguous in the last axis")


def _check_caches(
    query_key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens, num_rotated, head_dim = query_key.shape
    num_kv_heads = value.shape[1]
    if key_cache.dim() != 4 or key_cache.shape[1] != num_kv_heads or key_cache.shape[3] != head_dim:
        raise ValueError(
            f"key_cache is {list(key_cache.shape)}; for value {list(value.shape)} it must be [num_blocks, "
            f"{num_kv_heads}, block_size, {head_dim}]"
        )
    if num_rotated <= num_kv_heads:
        raise ValueError(f"query_key has {num_rotated} heads, no more than the {num_kv_heads} of the keys")
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"key_cache is {key_cache.dtype} {list(key_cache.shape)}, value_cache {value_cache.dtype} "
            f"{list(value_cache.shape)}; they must be alike"
        )
    check_supported(head_dim, key_cache.dtype)
    if not key_cache.is_contiguous() or not value_cache.is_contiguous():
        raise ValueError("key_cache and value_cache must be contiguous")
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}; it must be int32 or int64, "
            f"[{num_tokens}]"
        )
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping has strides {slot_mapping.stride()}; it must be contiguous")

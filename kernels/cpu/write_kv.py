"""Rotate queries and keys, and store keys and values, in one pass over the fused projection, on a CPU."""

from ctypes import Structure, addressof, c_int64, c_void_p

import torch

from radixserve.kernels.cpu.kv_cache import check_cache
from radixserve.kernels.cpu.library import library, threads_for


class _Write(Structure):
    """Write of write_kv.h."""

    _fields_ = (
        ("query_key", c_void_p),
        ("query_key_token_stride", c_int64),
        ("query_key_head_stride", c_int64),
        ("value", c_void_p),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("angle_stride", c_int64),
        ("slots", c_void_p),
        ("query", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("block_stride", c_int64),
        ("kv_head_stride", c_int64),
        ("slot_stride", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
    )


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
    head_dim]. Both float32 and contiguous in the last axis, so views of the fused projection will do. cos, sin:
    [T, head_dim / 2] float32, alike and contiguous in the last axis. key_cache, value_cache: as for paged_attention.
    slot_mapping: contiguous [T] int64, block_id * block_size + offset, no slot twice; -1 writes nothing.
    Element i turns with element i + head_dim / 2, in float32; float16 caches get the result rounded to nearest.
    Returns [T, num_heads, head_dim], contiguous. Raises ValueError if shapes, dtypes or strides disagree; slots beyond
    the cache are the caller's fault and not looked for.
    Source: Su et al. 2021 (RoFormer), section 3.2.2; Kwon et al. 2023 (PagedAttention), section 4.3.
    """
    check_cache(key_cache, value_cache)
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_tokens, num_rotated = query_key.shape[:2]
    num_heads = num_rotated - num_kv_heads
    if query_key.shape != (num_tokens, num_rotated, head_dim) or num_heads < 1:
        raise ValueError(f"query_key is {list(query_key.shape)}; the caches are {list(key_cache.shape)}")
    if value.shape != (num_tokens, num_kv_heads, head_dim):
        raise ValueError(f"value is {list(value.shape)}; it must be {[num_tokens, num_kv_heads, head_dim]}")
    if cos.shape != (num_tokens, head_dim // 2) or sin.shape != cos.shape or sin.stride() != cos.stride():
        raise ValueError(
            f"cos is {list(cos.shape)}, sin {list(sin.shape)}; both must be {[num_tokens, head_dim // 2]}, of equal "
            "strides"
        )
    for name, tensor in (("query_key", query_key), ("value", value), ("cos", cos), ("sin", sin)):
        if tensor.dtype != torch.float32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} is {tensor.dtype}; it must be float32 and contiguous in the last axis")
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}; it must be int64 {[num_tokens]}, "
            "contiguous"
        )
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    write = _Write(
        query_key.data_ptr(),
        *query_key.stride()[:2],
        value.data_ptr(),
        *value.stride()[:2],
        cos.data_ptr(),
        sin.data_ptr(),
        cos.stride(0),
        slot_mapping.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *key_cache.stride()[:3],
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
    )
    num_elements = num_tokens * (num_rotated + num_kv_heads) * head_dim
    library().radixserve_write_kv(addressof(write), key_cache.dtype == torch.float16, threads_for(num_elements))
    return query

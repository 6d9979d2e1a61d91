"""What every launcher that touches the K/V cache asks of it."""

import torch

# Floats in a vector register.
HEAD_DIM_MULTIPLE = 8


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise ValueError unless the two are alike and the kernels can address them.

    Both [num_blocks, num_kv_heads, block_size, head_dim] on the CPU, float32 or float16, contiguous in the last axis,
    with head_dim a multiple of 8.
    """
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError(
            f"key_cache is {list(key_cache.shape)} with strides {key_cache.stride()}, value_cache "
            f"{list(value_cache.shape)} with {value_cache.stride()}; they must be alike, with four axes"
        )
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (torch.float32, torch.float16):
        raise ValueError(
            f"key_cache is {key_cache.dtype}, value_cache {value_cache.dtype}; both must be float32 or float16"
        )
    if key_cache.shape[3] % HEAD_DIM_MULTIPLE or key_cache.stride(3) != 1:
        raise ValueError(
            f"the caches have heads of {key_cache.shape[3]} elements, {key_cache.stride(3)} apart; the kernels take "
            f"multiples of {HEAD_DIM_MULTIPLE}, contiguous"
        )
    if not key_cache.is_cpu or not value_cache.is_cpu:
        raise ValueError(f"the caches are on {key_cache.device} and {value_cache.device}; the kernels run on the CPU")

"""RMSNorm on a CPU, alone or of a sum."""

from ctypes import Structure, addressof, c_float, c_int64, c_void_p

import torch

from radixserve.kernels.cpu.library import library, threads_for


class _Norm(Structure):
    """Norm of rms_norm.h."""

    _fields_ = (
        ("x", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("delta", c_void_p),
        ("delta_stride", c_int64),
        ("weight", c_void_p),
        ("normalized", c_void_p),
        ("normalized_token_stride", c_int64),
        ("total", c_void_p),
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("row_size", c_int64),
        ("eps", c_float),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x by its root mean square, then by weight.

    x: [T, row_size], or [T, num_heads, row_size] with a weight for each head; contiguous in the last axis, so a view of
    a wider tensor will do. weight: of x's shape without T, contiguous. Both float32.
    Returns a contiguous tensor of x's shape. Raises ValueError for anything else.
    Source: Zhang and Sennrich 2019 (RMSNorm).
    """
    _check("x", x, x.shape)
    if x.dim() not in (2, 3) or weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"x is {list(x.shape)}, weight {weight.dtype} {list(weight.shape)}; x must be [T, row_size] or [T, "
            "num_heads, row_size] and weight its shape without T, contiguous"
        )
    num_heads = 1 if x.dim() == 2 else x.shape[1]
    normalized = torch.empty_like(x, memory_format=torch.contiguous_format)
    norm = _Norm(
        x.data_ptr(),
        x.stride(0),
        0 if x.dim() == 2 else x.stride(1),
        None,
        0,
        weight.data_ptr(),
        normalized.data_ptr(),
        normalized.stride(0),
        None,
        x.shape[0],
        num_heads,
        x.shape[-1],
        eps,
    )
    library().radixserve_rms_norm(addressof(norm), threads_for(x.numel()))
    return normalized


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta, and the rms_norm of that sum, in one pass.

    x, delta: [T, row_size] float32, contiguous in the last axis. weight: [row_size] float32, contiguous. Both results
    are contiguous. Raises ValueError for anything else.
    """
    _check("x", x, x.shape)
    _check("delta", delta, x.shape)
    if x.dim() != 2 or weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"x is {list(x.shape)}, weight {weight.dtype} {list(weight.shape)}; x must be [T, row_size] and weight "
            "[row_size], contiguous"
        )
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    normalized = torch.empty_like(total)
    norm = _Norm(
        x.data_ptr(),
        x.stride(0),
        0,
        delta.data_ptr(),
        delta.stride(0),
        weight.data_ptr(),
        normalized.data_ptr(),
        normalized.stride(0),
        total.data_ptr(),
        x.shape[0],
        1,
        x.shape[1],
        eps,
    )
    library().radixserve_rms_norm(addressof(norm), threads_for(x.numel()))
    return total, normalized


def _check(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_cpu or tensor.shape != shape or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be float32 {list(shape)} on "
            "the CPU, contiguous in the last axis"
        )

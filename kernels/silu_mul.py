"""The gate of the MLP: silu(gate) * up in one pass over the fused projection."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from radixserve.kernels.tiles import DTYPES, FAMILIES, TRITON_NAMES, CompileCase

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, result: tl.tensor, size: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=is_in, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + row * size + columns, activated.to(result.dtype.element_ty), mask=is_in)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, computed in float32.

    gate_up: [T, 2 * n] with gate in its first half; float16, bfloat16 or float32; contiguous in the last axis.
    Returns a contiguous [T, n] of the same dtype. Raises ValueError for anything else.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        raise ValueError(f"gate_up is {list(gate_up.shape)}; it must be [T, 2 * n]")
    if gate_up.dtype not in DTYPES:
        raise ValueError(f"gate_up is {gate_up.dtype}; the kernel takes {', '.join(map(str, DTYPES))}")
    if gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has strides {gate_up.stride()}; its last axis must be contiguous")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate_up,
            result,
            size,
            gate_up.stride(0),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return result


def compile_cases() -> Iterator[CompileCase]:
    """Yield the kernel for each dtype; its tile is always the same."""
    for family in FAMILIES:
        for dtype in DTYPES:
            pointer = f"*{TRITON_NAMES[dtype]}"
            yield CompileCase(
                name=f"silu_mul {TRITON_NAMES[dtype]}",
                family=family,
                fn=silu_mul_kernel,
                signature={"gate_up": pointer, "result": pointer, "size": "i32", "stride": "i32", "BLOCK": "constexpr"},
                constexprs={"BLOCK": _BLOCK},
                num_warps=_NUM_WARPS,
                num_stages=1,
                divisible_by_16=("gate_up", "result", "size", "stride"),
            )

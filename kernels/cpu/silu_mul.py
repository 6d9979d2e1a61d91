"""The gate of an MLP on a CPU: silu(gate) * up."""

import torch

from radixserve.kernels.cpu.library import library, threads_for


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.

    gate_up: [T, 2 * n] float32 with gate in its first half, contiguous in the last axis. Returns a contiguous [T, n].
    Raises ValueError for anything else.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        raise ValueError(f"gate_up is {list(gate_up.shape)}; it must be [T, 2 * n]")
    if gate_up.dtype != torch.float32 or not gate_up.is_cpu or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate_up is {gate_up.dtype} on {gate_up.device} with strides {gate_up.stride()}; it must be float32 on "
            "the CPU, contiguous in the last axis"
        )
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_rows, size), dtype=torch.float32)
    library().radixserve_silu_mul(
        gate_up.data_ptr(), gate_up.stride(0), result.data_ptr(), num_rows, size, threads_for(result.numel())
    )
    return result

"""Projections, in the form that is fastest on their device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from radixserve.kernels.cpu import library
from radixserve.kernels.cpu.linear import PackedProjection, linear, pack_projection
from radixserve.kernels.cpu.weight_memory import WeightMemory
from radixserve.model.precision import Precision

# oneDNN lays a weight out for a number of rows. That for 16 was no slower than others at 1 to 512 rows, so one copy
# serves them all, and the sums of a row are the same whatever stands beside it.
_ONEDNN_ROWS = 16


class Linear(Protocol):
    """A projection of out_features by in_features weights, perhaps with a bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias of x [T, in_features]: [T, out_features], in the dtype of x."""


LinearMaker = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Makes a projection of its weight, [out_features, in_features], and its bias, [out_features] or None."""


@dataclass(slots=True, frozen=True)
class DenseLinear:
    """Implements Linear with the weight as it is: for GPUs, and for dtypes that no CPU library packs."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return functional.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """Implements Linear in float32 on a CPU, with a weight that oneDNN has laid out. Keeps no other copy of it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


class CppLinear:
    """Implements Linear on a CPU with a weight in float16, everything else in float32, by the C++ kernel.

    The weight is rounded to float16, and its elements are taken for at most 65,504: see float16_obstacle. A row's bits
    do not depend on the other rows. Keeps no other copy of the weight. Measured on the demo model, it takes 0.7 to 0.85
    of fbgemm's time at 1 to 32 rows, and as long at 512.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, memory: WeightMemory) -> None:
        self.packed: PackedProjection = pack_projection(weight, bias, memory)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return linear(x, self.packed)


class Float16Linear:
    """Implements Linear as CppLinear does, by fbgemm: for where the C++ kernels are not built.

    The weight is rounded to float16, and its elements are taken for at most 65,504: see float16_obstacle. The sums and
    the bias are in float32. Keeps no other copy of the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return result


def has_float16_linear() -> bool:
    """Return whether there are projections with float16 weights here, ours or fbgemm's; both need x86 with AVX2."""
    return library.obstacle() is None or "fbgemm" in torch.backends.quantized.supported_engines


def choose_linear(precision: Precision, device: torch.device) -> LinearMaker:
    """Return the projections for a precision on a device.

    Raises ValueError if weights and activations differ otherwise than float16 and float32 on a CPU.
    """
    is_float32_on_cpu = device.type == "cpu" and precision.activations == torch.float32
    if is_float32_on_cpu and precision.weights == torch.float16:
        return partial(CppLinear, memory=WeightMemory()) if library.obstacle() is None else Float16Linear
    if precision.weights != precision.activations:
        raise ValueError(f"on {device.type} no projection takes {precision.weights} to {precision.activations}")
    return OneDnnLinear if is_float32_on_cpu and torch._C._has_mkldnn else DenseLinear


def float16_obstacle(weight: torch.Tensor) -> str | None:
    """Return why a weight loses more than rounding in float16, None if it does not.

    Elements up to 65,504 can be told, and those below 2**-14 are rounded to multiples of 2**-24. Where the root mean
    square is at least 2**-14 that moves the weight as a whole by no more than 2**-10 of its norm, as the rounding of
    its larger elements may, however small some of them are.
    """
    if weight.dtype == torch.float16:
        return None
    limits = torch.finfo(torch.float16)
    lowest, highest = weight.aminmax()
    largest = max(-lowest.item(), highest.item())
    # Written so that a NaN is an obstacle.
    if not largest <= limits.max:
        return f"holds {largest:g}, and float16 ends at {limits.max:g}"
    root_mean_square = torch.linalg.vector_norm(weight, dtype=torch.float32).item() / weight.numel() ** 0.5
    if 0 < root_mean_square < limits.tiny:
        return f"has elements of around {root_mean_square:.0e}, and float16 is coarse below {limits.tiny:.0e}"
    return None

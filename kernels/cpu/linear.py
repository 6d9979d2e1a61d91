"""Projections with float16 weights on a CPU."""

from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from radixserve.kernels.cpu.library import library, threads_for
from radixserve.kernels.cpu.weight_memory import WeightMemory

_PANEL_OUTPUTS = 32


class Projection(Structure):
    """Projection of linear.h."""

    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("in_features", c_int64), ("out_features", c_int64))


class _Rows(Structure):
    """ProjectedRows of linear.h."""

    _fields_ = (("x", c_void_p), ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64), ("count", c_int64))


@dataclass(slots=True, frozen=True)
class PackedProjection:
    """A weight in panels, [ceil(out_features / 32), in_features, 32] float16, and a bias as long, or None.

    projection: the C++ struct, whose addresses are those of panels and bias.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    projection: Projection


def pack_projection(weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory) -> PackedProjection:
    """Round a weight to float16 and bring it into panels of 32 outputs, in memory of its own.

    weight: [out_features, in_features] float32, contiguous in the last axis; the bias [out_features] float32. Neither
    is kept. Raises ValueError for anything else.
    """
    if weight.dim() != 2 or weight.dtype != torch.float32 or not weight.is_cpu or weight.stride(1) != 1:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} on {weight.device}; it must be float32 [out_features, "
            "in_features] on the CPU, contiguous in the last axis"
        )
    out_features, in_features = weight.shape
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != torch.float32 or not bias.is_cpu):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; it must be float32 {[out_features]}")
    num_panels = -(-out_features // _PANEL_OUTPUTS)
    panels = memory.take(num_panels, in_features, _PANEL_OUTPUTS, dtype=torch.float16)
    library().radixserve_pack_weight(
        weight.data_ptr(), weight.stride(0), out_features, in_features, panels.data_ptr(), threads_for(weight.numel())
    )
    if bias is not None:
        bias = functional.pad(bias, (0, num_panels * _PANEL_OUTPUTS - out_features))
    bias_address = None if bias is None else bias.data_ptr()
    projection = Projection(panels.data_ptr(), bias_address, in_features, out_features)
    return PackedProjection(panels, bias, in_features, out_features, projection)


def linear(x: torch.Tensor, packed: PackedProjection, *, lanes: Literal[0, 8, 16] = 0) -> torch.Tensor:
    """Return x @ weight.T + bias, with the products summed in float32.

    x: [T, in_features] float32, contiguous in the last axis. lanes: floats of the vectors that are computed with, 8 for
    AVX2, 16 for AVX-512, 0 for the widest that the CPU has. A sum takes its products in order, each by a fused
    multiply-add, and then the bias, so a row's bits depend on nothing but the row: not on others, threads or lanes.
    Returns a contiguous [T, out_features]. Raises ValueError for anything else, and for vectors that the CPU lacks.
    """
    if x.dim() != 2 or x.shape[1] != packed.in_features or x.dtype != torch.float32 or not x.is_cpu:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}; it must be float32 [T, {packed.in_features}] on the CPU"
        )
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}; it must be contiguous in the last axis")
    if lanes == 16 and not library().radixserve_has_avx512():
        raise ValueError("this CPU lacks AVX-512")
    num_rows = x.shape[0]
    y = torch.empty((num_rows, packed.out_features), dtype=torch.float32)
    rows = _Rows(x.data_ptr(), x.stride(0), y.data_ptr(), packed.out_features, num_rows)
    num_threads = threads_for(packed.panels.numel() * min(num_rows, 1))
    library().radixserve_linear(addressof(packed.projection), addressof(rows), lanes, num_threads)
    return y

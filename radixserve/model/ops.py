"""The decoder's small operations between its matrix products, as one value that a device's kernels can replace."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixserve.kernels import reference


@dataclass(slots=True, frozen=True)
class DecoderOps:
    """Functions of the signatures and results of their namesakes in kernels/reference.py.

    rms_norm also takes x [T, num_heads, head_dim], a view of a wider tensor, with a weight for each head.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]


TORCH_OPS = DecoderOps(rms_norm=reference.rms_norm, add_rms_norm=reference.add_rms_norm, silu_mul=reference.silu_mul)

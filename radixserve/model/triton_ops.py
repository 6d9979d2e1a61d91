"""The decoder's small operations as Triton kernels. Imports triton, which not every platform has."""

from radixserve.kernels.rms_norm import MAX_ROW, add_rms_norm, rms_norm
from radixserve.kernels.silu_mul import silu_mul
from radixserve.model.ops import DecoderOps

__all__ = ["MAX_ROW", "TRITON_OPS"]

TRITON_OPS = DecoderOps(rms_norm=rms_norm, add_rms_norm=add_rms_norm, silu_mul=silu_mul)

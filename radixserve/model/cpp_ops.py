"""The decoder's small operations as C++ kernels."""

from radixserve.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from radixserve.kernels.cpu.silu_mul import silu_mul
from radixserve.model.ops import DecoderOps

CPP_OPS = DecoderOps(rms_norm=rms_norm, add_rms_norm=add_rms_norm, silu_mul=silu_mul)

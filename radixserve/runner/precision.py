"""Choose the dtypes of a model's numbers."""

import torch

from radixserve.config import EngineConfig
from radixserve.model.linear import has_float16_linear
from radixserve.model.precision import FLOAT32, Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_precision(config: EngineConfig, device: torch.device) -> tuple[Precision, list[str]]:
    """Return what is asked for, and what a user should know of it; auto is the fastest that is safe on the device.

    On a CPU that is float16 for what is read from memory, and float32 for what is computed of it. It is float32 alone
    where there are no such projections, and under Triton's interpreter, which is there to look at numbers.
    """
    if config.dtype != "auto":
        return Precision.uniform(_DTYPES[config.dtype]), []
    if device.type != "cpu":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return Precision.uniform(torch.bfloat16 if has_bfloat16 else torch.float16), []
    if config.attention_backend == "triton":
        return FLOAT32, []
    if not has_float16_linear():
        notice = "weights and K/V are float32, as neither the C++ kernels nor fbgemm project in float16 here."
        return FLOAT32, [notice]
    return Precision(weights=torch.float16, activations=torch.float32, kv_cache=torch.float16), []


def name_of(dtype: torch.dtype) -> str:
    """Return float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")

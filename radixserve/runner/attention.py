"""Choose and make the attention backend."""

from dataclasses import dataclass
from typing import Literal

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.model.config import ModelConfig
from radixserve.model.ops import TORCH_OPS, DecoderOps


@dataclass(slots=True, frozen=True)
class ChosenAttention:
    """A backend, the value of --attention-backend that stands for it, and the decoder's operations beside it."""

    name: Literal["torch", "triton"]
    backend: AttentionBackend
    ops: DecoderOps


def choose_attention(
    config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ChosenAttention:
    """Return the backend that is asked for; auto is triton on a GPU and torch on a CPU.

    Raises ConfigError if it cannot run this model here. No other backend takes its place: one that is several times
    slower, unasked and unseen, is worse than a start that fails.
    """
    name = config.attention_backend
    if name == "auto":
        name = "torch" if device.type == "cpu" else "triton"
    if name == "torch":
        backend = PagedSdpaBackend(block_size=config.block_size, num_kv_heads=model.num_kv_heads)
        return ChosenAttention(name, backend, TORCH_OPS)
    try:
        # Triton is not on every platform, so it is imported only where it is used.
        from radixserve.attention.paged_triton import PagedTritonBackend, check_device  # noqa: PLC0415
        from radixserve.model.triton_ops import MAX_ROW, TRITON_OPS  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            "--attention-backend triton needs the package triton; install it, or give --attention-backend torch"
        ) from None
    check_device(device, dtype)
    if model.hidden_size > MAX_ROW:
        raise ConfigError(
            f"--attention-backend triton: the hidden size is {model.hidden_size}, and the kernels take at most "
            f"{MAX_ROW}; give --attention-backend torch"
        )
    triton_backend = PagedTritonBackend(
        num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype
    )
    return ChosenAttention(name, triton_backend, TRITON_OPS)

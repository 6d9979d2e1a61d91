"""Choose and make the attention backend."""

from dataclasses import dataclass
from typing import Literal

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.model.config import ModelConfig


@dataclass(slots=True, frozen=True)
class ChosenAttention:
    """A backend and the value of --attention-backend that stands for it."""

    name: Literal["torch", "triton"]
    backend: AttentionBackend


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
        return ChosenAttention(name, PagedSdpaBackend(block_size=config.block_size, num_kv_heads=model.num_kv_heads))
    try:
        # Triton is not on every platform, so it is imported only where it is used.
        from radixserve.attention.paged_triton import PagedTritonBackend, check_device  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            "--attention-backend triton needs the package triton; install it, or give --attention-backend torch"
        ) from None
    check_device(device, dtype)
    backend = PagedTritonBackend(
        block_size=config.block_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )
    return ChosenAttention(name, backend)

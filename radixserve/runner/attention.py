"""Choose and make the attention backend."""

from dataclasses import dataclass
from typing import Literal

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.paged_cpp import PagedCppBackend
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.kernels.cpu import library
from radixserve.kernels.cpu.kv_cache import HEAD_DIM_MULTIPLE
from radixserve.model.config import ModelConfig
from radixserve.model.cpp_ops import CPP_OPS
from radixserve.model.ops import TORCH_OPS, DecoderOps


@dataclass(slots=True, frozen=True)
class ChosenAttention:
    """A backend, the value of --attention-backend that stands for it, and the decoder's operations beside it.

    notices: what a user should know of the choice, a sentence each.
    """

    name: Literal["torch", "cpp", "triton"]
    backend: AttentionBackend
    ops: DecoderOps
    notices: tuple[str, ...] = ()


def choose_attention(
    config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ChosenAttention:
    """Return the backend that is asked for; auto is triton on a GPU, and on a CPU cpp where it runs, else torch.

    Raises ConfigError if it cannot run this model here. No other backend takes the place of one that was asked for, or
    of triton: one that is several times slower, unasked and unseen, is worse than a start that fails. On a CPU torch
    does take the place of cpp, which not every machine can build, and a notice says so.
    """
    name = config.attention_backend
    if name == "auto":
        name = "cpp" if device.type == "cpu" else "triton"
    if name == "triton":
        return _triton_attention(config, model, dtype=dtype, device=device)
    notices: tuple[str, ...] = ()
    if name == "cpp":
        obstacle = _obstacle_to_cpp(model, dtype=dtype, device=device)
        if obstacle is None:
            cpp_backend = PagedCppBackend(
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                block_size=config.block_size,
            )
            return ChosenAttention(name, cpp_backend, CPP_OPS)
        if config.attention_backend == "cpp":
            raise ConfigError(f"--attention-backend cpp: {obstacle}; give --attention-backend torch")
        notices = (f"attention runs on torch, which is slower than cpp: {obstacle}.",)
    torch_backend = PagedSdpaBackend(block_size=config.block_size, num_kv_heads=model.num_kv_heads)
    return ChosenAttention("torch", torch_backend, TORCH_OPS, notices)


def _obstacle_to_cpp(model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the C++ kernels cannot run this model here, None if they can."""
    if device.type != "cpu":
        return f"the C++ kernels need a CPU, and the model runs on {device.type}"
    if dtype != torch.float32:
        return f"the C++ kernels compute in float32, and --dtype is {str(dtype).removeprefix('torch.')}"
    if model.head_dim % HEAD_DIM_MULTIPLE:
        return f"the head size is {model.head_dim}, and the C++ kernels take multiples of {HEAD_DIM_MULTIPLE}"
    return library.obstacle()


def _triton_attention(
    config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ChosenAttention:
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
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        block_size=config.block_size,
    )
    return ChosenAttention("triton", triton_backend, TRITON_OPS)

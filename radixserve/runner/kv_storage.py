"""The memory of the K/V cache: how many blocks, and their tensors."""

import torch

from radixserve.attention.backend import KVLayer
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.model.config import ModelConfig
from radixserve.runner.memory import DeviceMemory

# Without --kv-cache-memory or --num-kv-blocks, a CPU gets so many bytes of K/V, but never more than this share of the
# memory that is available once the weights are loaded.
DEFAULT_CPU_BYTES = 2 * 2**30
CPU_MEMORY_SHARE = 0.5
# The rest of a GPU's memory is for activations, logits and what others use.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes in all layers, keys and values together."""
    return 2 * model.num_layers * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize


def allocate_kv_layers(
    model: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVLayer]:
    """Allocate the blocks of every layer, zeroed: attention multiplies slots that it masks, so none may hold NaN."""
    shape = (num_blocks, model.num_kv_heads, block_size, model.head_dim)

    def allocate() -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return [KVLayer(key=allocate(), value=allocate()) for _ in range(model.num_layers)]


def asked_num_blocks(config: EngineConfig, block_bytes: int) -> int | None:
    """Return the number of blocks that the settings ask for; None if they leave it to the engine.

    Raises ConfigError if --kv-cache-memory holds not even one.
    """
    if config.kv_cache_memory is None:
        return config.num_kv_blocks
    if config.kv_cache_memory < block_bytes:
        raise ConfigError(
            f"--kv-cache-memory is {format_bytes(config.kv_cache_memory)}, but one K/V block takes "
            f"{format_bytes(block_bytes)}; give more, or lower --block-size"
        )
    return config.kv_cache_memory // block_bytes


def default_num_blocks(config: EngineConfig, block_bytes: int, memory: DeviceMemory, device: torch.device) -> int:
    """Return the number of blocks where the settings name none; memory is measured after the weights were loaded.

    Raises ConfigError if not even one block fits.
    """
    if device.type == "cuda":
        share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        budget = int(memory.total * share) - (memory.total - memory.available)
        advice = f"raise --gpu-memory-utilization, now {share:g}, or free memory on the GPU"
    else:
        budget = min(DEFAULT_CPU_BYTES, int(memory.available * CPU_MEMORY_SHARE))
        advice = "free memory, or set --kv-cache-memory"
    if budget < block_bytes:
        raise ConfigError(
            f"{format_bytes(max(0, budget))} of {device.type} memory is left for K/V after loading the model, but one "
            f"block takes {format_bytes(block_bytes)}; {advice}"
        )
    return budget // block_bytes


def check_blocks_fit(num_blocks: int, block_bytes: int, memory: DeviceMemory, device: torch.device) -> None:
    """Raise ConfigError, with the number that would fit, if the device has no memory for so many blocks."""
    if num_blocks * block_bytes > memory.available:
        raise ConfigError(
            f"{num_blocks} K/V blocks take {format_bytes(num_blocks * block_bytes)}, but the {device.type} has "
            f"{format_bytes(memory.available)} left: at most {memory.available // block_bytes} blocks fit; lower "
            "--num-kv-blocks or --kv-cache-memory"
        )


def format_bytes(count: int) -> str:
    """Return a size with the binary unit that reads best, such as 1.5 GiB."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"

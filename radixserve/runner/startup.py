"""Bring a model up: choose device, dtype, lengths and blocks, load the weights, allocate the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError, Float16RangeError
from radixserve.model.loader import load_model, read_model_config
from radixserve.model.precision import FLOAT32, Precision
from radixserve.model_path import resolve_model_path
from radixserve.runner.attention import choose_attention
from radixserve.runner.context_length import choose_max_model_len
from radixserve.runner.executor import Executor
from radixserve.runner.kv_storage import (
    allocate_kv_layers,
    asked_num_blocks,
    bytes_per_block,
    check_blocks_fit,
    default_num_blocks,
)
from radixserve.runner.memory import device_memory, return_free_memory
from radixserve.runner.model_executor import ModelExecutor
from radixserve.runner.precision import choose_precision, name_of

# A step should keep the device busy and yet not hold up the sequences that only wait for their next token.
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}


@dataclass(slots=True, frozen=True)
class StartedExecutor:
    """An executor that is ready to run, and what was chosen for it.

    weights_dtype, dtype, kv_cache_dtype: names of the weights', the activations' and the K/V blocks'.
    max_model_len, num_blocks, max_num_batched_tokens: the settings, or what start-up chose in their place.
    device: cpu or cuda. attention_backend: torch, cpp or triton. num_threads: of the CPU that compute. eos_token_ids:
    any of them ends an answer. notices: what start-up lowered or did without, a sentence each.
    """

    executor: Executor
    architecture: str
    weights_dtype: str
    dtype: str
    kv_cache_dtype: str
    device: str
    attention_backend: str
    num_threads: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    bytes_per_block: int
    notices: tuple[str, ...]


def start_executor(config: EngineConfig, *, show_progress: bool) -> StartedExecutor:
    """Load the model and allocate its cache.

    Raises ConfigError for settings that the model or the machine cannot meet, before the weights are read wherever
    they are not needed to know; ModelLoadError for a model that cannot be read.
    """
    device = choose_device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    precision, notices = choose_precision(config, device)
    try:
        return _start(config, device, precision, notices, show_progress=show_progress)
    except Float16RangeError as error:
        if config.dtype != "auto" or device.type != "cpu":
            raise Float16RangeError(f"{error}; give --dtype float32") from None
        notices = [f"weights and K/V are float32: {error}."]
    # Outside of the handler, as the error's traceback holds the weights that were read until then.
    return _start(config, device, FLOAT32, notices, show_progress=show_progress)


def _start(
    config: EngineConfig, device: torch.device, precision: Precision, notices: Sequence[str], *, show_progress: bool
) -> StartedExecutor:
    path = resolve_model_path(config.model)
    model = read_model_config(path)
    attention = choose_attention(config, model, dtype=precision.activations, device=device)
    block_bytes = bytes_per_block(model, config.block_size, precision.kv_cache)
    num_blocks = asked_num_blocks(config, block_bytes)
    if num_blocks is not None:
        check_blocks_fit(num_blocks, block_bytes, device_memory(device), device)
    num_pool_tokens = None if num_blocks is None else num_blocks * config.block_size
    choose_max_model_len(config.max_model_len, model, num_pool_tokens)

    try:
        decoder = load_model(
            path,
            model,
            precision=precision,
            device=device,
            show_progress=show_progress,
            ops=attention.ops,
        )
        return_free_memory()
        memory = device_memory(device)
        if num_blocks is None:
            num_blocks = default_num_blocks(config, block_bytes, memory, device)
        check_blocks_fit(num_blocks, block_bytes, memory, device)
        max_model_len, lowered = choose_max_model_len(config.max_model_len, model, num_blocks * config.block_size)
        kv_layers = allocate_kv_layers(
            model, num_blocks=num_blocks, block_size=config.block_size, dtype=precision.kv_cache, device=device
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the {device.type} ran out of memory for the model: {error}") from error
    return StartedExecutor(
        executor=ModelExecutor(decoder, kv_layers, attention.backend, num_threads=config.threads),
        architecture=model.architecture,
        weights_dtype=name_of(precision.weights),
        dtype=name_of(precision.activations),
        kv_cache_dtype=name_of(precision.kv_cache),
        device=device.type,
        attention_backend=attention.name,
        num_threads=torch.get_num_threads(),
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type],
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_blocks=num_blocks,
        bytes_per_block=block_bytes,
        notices=(*notices, *attention.notices, *lowered),
    )


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device to run on. Raises ConfigError if a setting needs a GPU and none will be used."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device is cuda, but torch finds no CUDA device here; give --device cpu")
    if config.device == "cpu" or not has_cuda:
        if config.gpu_memory_utilization is not None:
            raise ConfigError(
                "--gpu-memory-utilization needs a GPU, and the model runs on the CPU; give --kv-cache-memory"
            )
        if config.kv_cache_host_memory is not None:
            raise ConfigError(
                "--kv-cache-host-memory needs K/V on a GPU, and the model runs on the CPU; raise --kv-cache-memory"
            )
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())

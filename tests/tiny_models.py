"""Tiny random models in Hugging Face form, made by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_transformers_model(family: str = "llama", *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Return a random float32 model; settings override the config's.

    Biases and norms are random too, and weights are large enough that logits differ by whole units.
    """
    config_class, model_class = FAMILIES[family]
    shape = {
        "vocab_size": 160,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "initializer_range": 0.15,
    }
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**shape | settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model


def save_tiny_model(
    directory: Path, family: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **settings: Any
) -> Path:
    """Save a tiny random model as config.json and safetensors, and return the directory."""
    model = tiny_transformers_model(family, seed=seed, **settings)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory

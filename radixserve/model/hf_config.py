"""Read config.json of a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

from radixserve.errors import ModelLoadError
from radixserve.model.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_magnitude,
)
from radixserve.model.fields import Fields
from radixserve.model.registry import Family, find_family


def read_hf_config(directory: Path) -> ModelConfig:
    """Return the model's shape from config.json, and its end tokens from generation_config.json if that names any.

    Raises ModelLoadError for a setting that would change the answer and is not supported.
    """
    path = directory / "config.json"
    values = _read_json(path)
    fields = Fields(values, str(path))
    family = find_family(_architecture(fields), source=str(path))
    _refuse_unsupported(fields, family)

    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    has_configured_bias = family.bias == "configured" and fields.flag("attention_bias")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", hidden_size // num_heads),
        intermediate_size=fields.size("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        max_position_embeddings=fields.size("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=family.bias == "qkv" or has_configured_bias,
        attention_output_bias=has_configured_bias,
        mlp_bias=family.architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(fields, family),
        eos_token_ids=_eos_token_ids(directory, fields),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return values


def _architecture(fields: Fields) -> str:
    architectures = fields.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else fields.get("model_type")
    if not isinstance(name, str):
        raise fields.error("architectures", "is missing, and so is model_type; which model is this?")
    return name


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise fields.error("hidden_act", f"is {activation!r}; only silu is supported")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is set; quantized weights are read from .gguf files only")
    if fields.get("use_mrope"):
        raise fields.error("use_mrope", "is set; multimodal positions are not supported")
    for kind in fields.get("layer_types") or ():
        # Sliding layers are exact up to their window, which _sliding_window reports.
        if kind != "full_attention" and (kind != "sliding_attention" or family.sliding_window == "none"):
            raise fields.error("layer_types", f"names {kind!r}; {family.architecture} runs with full_attention only")


def _sliding_window(fields: Fields, family: Family) -> int | None:
    if "sliding_attention" in (fields.get("layer_types") or ()):
        return fields.size("sliding_window")
    if family.sliding_window == "none" or fields.get("sliding_window") is None:
        return None
    if family.sliding_window == "switched" and not fields.flag("use_sliding_window"):
        return None
    return fields.size("sliding_window")


def _rope(fields: Fields) -> RopeConfig:
    """Read rope_parameters (transformers 5) or rope_theta and rope_scaling (4), in transformers' own precedence."""
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise fields.error("rope_parameters", "differs between layers, which is not supported")
    rope = Fields(parameters, f"{fields.source}, rope parameters")
    if rope.get("mrope_section") is not None:
        raise rope.error("mrope_section", "is set; multimodal positions are not supported")
    for holder in (fields, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "is not 1; rotating part of a head is not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    return RopeConfig(theta, _rope_scaling(rope, fields))


def _rope_scaling(rope: Fields, fields: Fields) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    max_position_embeddings = fields.size("max_position_embeddings")
    original = fields.size(
        "original_max_position_embeddings",
        rope.size("original_max_position_embeddings", max_position_embeddings),
    )
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=original,
        )
    if kind == "yarn":
        factor = rope.number("factor", max_position_embeddings / original)
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
            # A zero means the default here, as it does in transformers.
            beta_fast=rope.number("beta_fast", 32.0) or 32.0,
            beta_slow=rope.number("beta_slow", 1.0) or 1.0,
            truncate=rope.flag("truncate", True),
        )
    raise rope.error("rope_type", f"is {kind!r}; supported are default, linear, llama3 and yarn")


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)


def _eos_token_ids(directory: Path, fields: Fields) -> tuple[int, ...]:
    generation_path = directory / "generation_config.json"
    value = None
    if generation_path.is_file():
        value = _read_json(generation_path).get("eos_token_id")
    if value is None:
        value = fields.get("eos_token_id")
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in token_ids):
        raise fields.error("eos_token_id", f"is {value!r}; it must be a token id or a list of them")
    return tuple(token_ids)

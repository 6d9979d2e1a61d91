"""Read a model's shape from the metadata of a GGUF file."""

from pathlib import Path

from radixserve.errors import ModelLoadError
from radixserve.model.config import LinearScaling, ModelConfig, RopeConfig, RopeScaling, YarnScaling, yarn_magnitude
from radixserve.model.fields import Fields
from radixserve.model.gguf_file import GGUFFile
from radixserve.model.registry import find_family

# Each changes the answer, and no model of the supported architectures is known to set it.
_UNSUPPORTED = ("expert_count", "logit_scale", "attention.scale", "attention.clamp_kqv", "attention.temperature_scale")
_EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))  # sequence, turn, message


def read_gguf_config(path: Path) -> ModelConfig:
    """Return the model's shape. Biases and tied embeddings show in which tensors there are.

    Raises ModelLoadError for a setting that would change the answer and is not supported.
    """
    file = GGUFFile(path)
    general = Fields(file.metadata, str(path))
    name = general.get("general.architecture")
    if not isinstance(name, str):
        raise general.error("general.architecture", "is missing")
    family = find_family(name, source=str(path))
    if general.integer("split.count", 1) > 1:
        raise general.error("split.count", "is over 1: this is one part of a model; merge the parts into one file")
    fields = Fields(file.metadata, str(path), prefix=f"{name}.")
    for key in _UNSUPPORTED:
        if fields.get(key):
            raise fields.error(key, f"is {fields.get(key)}, which is not supported")

    num_heads = fields.size("attention.head_count")
    hidden_size = fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.size(key, head_dim) != head_dim:
            raise fields.error(key, f"is {fields.get(key)}; only the size of a key, {head_dim}, is supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{path}: the tensor token_embd.weight is missing")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        num_layers=fields.size("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(fields.number("rope.freq_base", 10000.0), _rope_scaling(fields)),
        max_position_embeddings=fields.size("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=family.qk_norm,
        sliding_window=fields.integer("attention.sliding_window", 0) or None,
        eos_token_ids=tuple(dict.fromkeys(general.integer(key) for key in _EOS_KEYS if key in file.metadata)),
    )


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        factor = fields.number("rope.scale_linear", 1.0)  # written by the first converters
        return None if factor in (0.0, 1.0) else LinearScaling(factor)
    if kind == "linear":
        return LinearScaling(fields.number("rope.scaling.factor"))
    if kind == "yarn":
        for key, neutral in (("yarn_ext_factor", (-1.0, 1.0)), ("yarn_log_multiplier", (0.0,))):
            if fields.number(f"rope.scaling.{key}", neutral[0]) not in neutral:
                raise fields.error(f"rope.scaling.{key}", "is set, which is not supported")
        factor = fields.number("rope.scaling.factor")
        magnitude = fields.number("rope.scaling.attn_factor", fields.number("rope.scaling.yarn_attn_factor", 1.0))
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=fields.size(
                "rope.scaling.original_context_length", fields.size("context_length")
            ),
            attention_factor=magnitude * yarn_magnitude(factor),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise fields.error("rope.scaling.type", f"is {kind!r}; supported are none, linear and yarn")

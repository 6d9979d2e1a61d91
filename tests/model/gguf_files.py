"""Write tiny GGUF files as converters do, beside the transformers model that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from transformers import PreTrainedModel

Encode = Callable[[np.ndarray], np.ndarray]

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[stem]}.{kind}"


def interleave_rotated_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Order the rows of each head 0, D/2, 1, D/2 + 1, … as converters of llama models do."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return rows[order]


@torch.no_grad()
def write_gguf(
    path: Path,
    model: PreTrainedModel,
    weight_type: gguf.GGMLQuantizationType,
    encode: Encode,
    *,
    settings: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    leave_out: str | None = None,
) -> Path:
    """Write model with its matrices encoded, and round the model's own matrices to what the file holds.

    encode: float32 rows to the raw rows of weight_type. settings: more metadata, names without the architecture.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_token_list(["a", "bc", ""])
    writer.add_token_types([1, 1, 3])
    for key, value in (settings or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    for name, parameter in model.named_parameters():
        if gguf_name(name) == leave_out:
            continue
        values = parameter.numpy()
        raw, raw_type = values, gguf.GGMLQuantizationType.F32
        if parameter.dim() > 1:
            raw, raw_type = encode(values), weight_type
            parameter.copy_(torch.from_numpy(dequantize(raw, raw_type).reshape(parameter.shape)))
        for projection, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if projection in name and architecture in ("llama", "mistral"):
                raw = interleave_rotated_rows(raw, num_heads)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=raw_type)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def float32(values: np.ndarray) -> np.ndarray:
    """Encode as F32."""
    return values.copy()

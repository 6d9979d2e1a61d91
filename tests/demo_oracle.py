"""The demo model in transformers, built from its GGUF file by other means than radixserve's."""

from functools import cache

import gguf
import torch
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from radixserve.model_path import resolve_model_path

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}


@cache
def demo_transformers_model() -> LlamaForCausalLM:
    """Return SmolLM2-135M-Instruct in float32; takes a few seconds the first time. Do not change its weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    weights = {}
    for tensor in gguf.GGUFReader(resolve_model_path(None)).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if not tensor.name.startswith("blk."):
            weights[{"token_embd.weight": "model.embed_tokens.weight"}.get(tensor.name, "model.norm.weight")] = weight
            continue
        _, layer, name, kind = tensor.name.split(".")
        if name in HEADS:
            # Within a head the file holds rows 0, 32, 1, 33, … of the original.
            weight = weight.view(HEADS[name], 32, 2, 576).permute(0, 2, 1, 3).reshape(weight.shape)
        weights[f"model.layers.{layer}.{NAMES[name]}.{kind}"] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # The rotary frequencies are no part of the weights, so they must be computed outside the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(weights, assign=True)
    return model.eval()

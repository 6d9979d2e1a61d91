"""The weights of a GGUF file."""

import re
from pathlib import Path

import torch

from radixserve.model.config import ModelConfig
from radixserve.model.gguf_file import GGUFFile
from radixserve.model.registry import FAMILIES

_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_NAMES = {hf_name: name for name, hf_name in _LAYER_NAMES.items()}
_GGUF_GLOBAL_NAMES = {hf_name: name for name, hf_name in _GLOBAL_NAMES.items()}


class GGUFSource:
    """Dequantises the tensors of a GGUF file, under their Hugging Face names."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        self._names = {_hf_name(name): name for name in self._file.tensors if name != _ROPE_FACTORS}
        self._permuted_heads: dict[str, int] = {}
        if FAMILIES[config.architecture].gguf_permutes_qk:
            self._permuted_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def names(self) -> set[str]:
        """Return the tensors' Hugging Face names; a tensor that has none keeps its own."""
        return set(self._names)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        tensor = torch.from_numpy(self._file.read(self._names[name]))
        for projection, num_heads in self._permuted_heads.items():
            if f".{projection}." in name and tensor.shape[0] % (2 * num_heads) == 0:
                return _restore_half_rotation(tensor, num_heads)
        return tensor

    def describe(self, name: str) -> str:
        """Return the tensor's name in the file, and the file."""
        return f"{self._file.path}: the tensor {self._names.get(name) or _gguf_name(name)}"

    def rope_frequency_factors(self) -> torch.Tensor | None:
        """Return rope_freqs.weight, in which converters store llama3's scaling."""
        return torch.from_numpy(self._file.read(_ROPE_FACTORS)) if _ROPE_FACTORS in self._file.tensors else None


def _restore_half_rotation(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Order a head's rows so that row i is rotated with row i + head_dim / 2; in the file it is with its neighbour."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [H, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        layer_name = _LAYER_NAMES.get(match[2])
        return f"model.layers.{match[1]}.{layer_name}.{kind}" if layer_name else name
    return f"{_GLOBAL_NAMES[stem]}.{kind}" if stem in _GLOBAL_NAMES else name


def _gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{_GGUF_LAYER_NAMES[match[2]]}.{kind}"
    return f"{_GGUF_GLOBAL_NAMES[stem]}.{kind}"

"""The decoder of the Llama family."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from radixserve.attention.backend import AttentionBackend, ForwardBatch, KVLayer
from radixserve.kernels.reference import rms_norm, rope, silu_mul
from radixserve.model.config import ModelConfig
from radixserve.model.rope import RotaryEmbedding


@dataclass(slots=True, frozen=True)
class Linear:
    """A projection. weight: [out_features, in_features]; bias: [out_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """Weights of one layer. qkv and gate_up are fused along their rows, in that order.

    qk_norm: [num_heads + num_kv_heads, head_dim], the norm's weight for each head of q and k.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    """Weights of a whole model, all in one dtype and on one device. lm_head shares embedding's tensor when tied."""

    embedding: torch.Tensor
    layers: list[DecoderLayer]
    norm: torch.Tensor
    lm_head: Linear


class Decoder:
    """A decoder-only transformer with grouped queries, rotary positions and a gated MLP, over a paged K/V cache."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, rotary: RotaryEmbedding) -> None:
        self.config = config
        self._weights = weights
        self._rotary = rotary

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_layers: list[KVLayer], attention: AttentionBackend) -> torch.Tensor:
        """Return float32 logits [S, vocab_size] of batch.logits_indices; write the batch's K/V into kv_layers.

        The result is an inference tensor: change it in place under torch.inference_mode only.
        """
        hidden = self.hidden_states(batch, kv_layers, attention)
        return self.logits(hidden.index_select(0, batch.logits_indices))

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, kv_layers: list[KVLayer], attention: AttentionBackend) -> torch.Tensor:
        """Return what the last layer makes of every token, [T, hidden_size]; write the batch's K/V into kv_layers."""
        weights = self._weights
        hidden = functional.embedding(batch.token_ids, weights.embedding)  # [T, hidden_size]
        cos, sin = self._rotary(batch.positions, hidden.dtype)
        metadata = attention.prepare(batch)
        eps = self.config.rms_norm_eps
        for layer, kv_layer in zip(weights.layers, kv_layers, strict=True):
            query, key, value = self._project_qkv(layer, rms_norm(hidden, layer.input_norm, eps), cos, sin)
            attention.write_kv(kv_layer, key, value, metadata)
            attended = attention.forward(kv_layer, query, metadata)
            hidden = hidden + layer.attention_output(attended.flatten(1))
            hidden = hidden + layer.down(silu_mul(layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, vocab_size] of hidden states [N, hidden_size]."""
        weights = self._weights
        return weights.lm_head(rms_norm(hidden, weights.norm, self.config.rms_norm_eps)).float()

    def _project_qkv(
        self, layer: DecoderLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries and keys, and values, each [T, its number of heads, head_dim]."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        num_rotated = num_heads + num_kv_heads
        qkv = layer.qkv(x).view(-1, num_rotated + num_kv_heads, self.config.head_dim)
        # q and k are normed and rotated as one tensor: half the calls.
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, self.config.rms_norm_eps)
        rotated = rope(query_key, cos, sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], value

"""The decoder of the Llama family."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from radixserve.attention.backend import AttentionBackend, ForwardBatch, KVLayer, Rotation
from radixserve.model.config import ModelConfig
from radixserve.model.linear import Linear
from radixserve.model.ops import TORCH_OPS, DecoderOps
from radixserve.model.rope import RotaryEmbedding


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
    """Weights of a whole model, on one device.

    embedding: [vocab_size, hidden_size], in the dtype of the projections' weights; the norms are in the activations'.
    lm_head shares embedding's tensor when they are tied and no library wants the weight in a layout of its own.
    """

    embedding: torch.Tensor
    layers: list[DecoderLayer]
    norm: torch.Tensor
    lm_head: Linear


class Decoder:
    """A decoder-only transformer with grouped queries, rotary positions and a gated MLP, over a paged K/V cache.

    ops: the norms and the gate, as torch functions or as kernels of the device.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rotary: RotaryEmbedding, ops: DecoderOps = TORCH_OPS
    ) -> None:
        self.config = config
        self._weights = weights
        self._rotary = rotary
        self._ops = ops

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_layers: list[KVLayer], attention: AttentionBackend) -> torch.Tensor:
        """Return float32 logits [S, vocab_size] of batch.logits_indices; write the batch's K/V into kv_layers.

        The result is an inference tensor: change it in place under torch.inference_mode only.
        """
        hidden = self.hidden_states(batch, kv_layers, attention)
        return self.logits(hidden.index_select(0, batch.logits_indices))

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, kv_layers: list[KVLayer], attention: AttentionBackend) -> torch.Tensor:
        """Return every token's normed hidden state, [T, hidden_size]; write the batch's K/V into kv_layers."""
        weights = self._weights
        hidden = functional.embedding(batch.token_ids, weights.embedding).to(weights.norm.dtype)  # [T, hidden_size]
        return self._run_layers(hidden, self._rotary(batch.positions), kv_layers, attention, attention.prepare(batch))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, vocab_size] of hidden states [N, hidden_size]."""
        return self._weights.lm_head(hidden).float()

    def _run_layers(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        kv_layers: list[KVLayer],
        attention: AttentionBackend,
        metadata: Any,
    ) -> torch.Tensor:
        """Return the normed last hidden states of embeddings, which may be overwritten; metadata is attention's."""
        weights, ops, eps = self._weights, self._ops, self.config.rms_norm_eps
        # Each sum is followed by a norm, the one of the next layer too, so one kernel can do both.
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        x = ops.rms_norm(hidden, weights.layers[0].input_norm, eps)
        for layer, kv_layer, next_norm in zip(weights.layers, kv_layers, next_norms, strict=True):
            query_key, value = self._project_qkv(layer, x)
            query = attention.write_kv(kv_layer, query_key, value, rotation, metadata)
            attended = attention.forward(kv_layer, query, metadata).flatten(1)
            hidden, x = ops.add_rms_norm(hidden, layer.attention_output(attended), layer.mlp_norm, eps)
            hidden, x = ops.add_rms_norm(hidden, layer.down(ops.silu_mul(layer.gate_up(x))), next_norm, eps)
        return x

    def _project_qkv(self, layer: DecoderLayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys as one tensor [T, num_heads + num_kv_heads, head_dim], unrotated, and values."""
        num_rotated = self.config.num_heads + self.config.num_kv_heads
        qkv = layer.qkv(x).view(-1, num_rotated + self.config.num_kv_heads, self.config.head_dim)
        # q and k are normed, and later rotated, as one tensor: half the calls.
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.qk_norm is not None:
            query_key = self._ops.rms_norm(query_key, layer.qk_norm, self.config.rms_norm_eps)
        return query_key, value

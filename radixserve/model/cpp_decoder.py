"""The decoder with all of its layers in one call of the C++ kernels."""

from typing import Any

import torch

from radixserve.attention.backend import AttentionBackend, KVLayer, Rotation
from radixserve.attention.paged_cpp import PagedCppMetadata
from radixserve.kernels.cpu.decoder_layers import DecoderLayers, KVCaches, LayersShape, LayerWeights
from radixserve.kernels.cpu.linear import PackedProjection
from radixserve.model.config import ModelConfig
from radixserve.model.cpp_ops import CPP_OPS
from radixserve.model.decoder import Decoder, DecoderWeights
from radixserve.model.linear import CppLinear, Linear
from radixserve.model.rope import RotaryEmbedding


class CppDecoder(Decoder):
    """A Decoder of float16 weights whose layers run in one call, where attention is of the C++ kernels too.

    The kernels are those that a Decoder with CPP_OPS calls one by one, so both give the same bits; what this saves is
    270 calls from Python, and 150 starts of threads or more, in a step of 30 layers.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, rotary: RotaryEmbedding) -> None:
        """Take weights whose projections are all CppLinear, as has_packed_layers tells."""
        super().__init__(config, weights, rotary, CPP_OPS)
        shape = LayersShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
        )
        layers = [
            LayerWeights(
                input_norm=layer.input_norm,
                qkv=_packed(layer.qkv),
                qk_norm=layer.qk_norm,
                attention_output=_packed(layer.attention_output),
                mlp_norm=layer.mlp_norm,
                gate_up=_packed(layer.gate_up),
                down=_packed(layer.down),
            )
            for layer in weights.layers
        ]
        self._layers = DecoderLayers(layers, weights.norm, shape)
        self._caches: tuple[list[KVLayer], KVCaches] | None = None

    def _run_layers(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        kv_layers: list[KVLayer],
        attention: AttentionBackend,
        metadata: Any,
    ) -> torch.Tensor:
        if not isinstance(metadata, PagedCppMetadata):
            return super()._run_layers(hidden, rotation, kv_layers, attention, metadata)
        caches = self._described_caches(kv_layers)
        return self._layers.run(hidden, rotation.cos, rotation.sin, metadata.slot_mapping, metadata.plan, caches)

    def _described_caches(self, kv_layers: list[KVLayer]) -> KVCaches:
        """Return what the kernel takes for a list of caches, kept for the next step, which has the same list."""
        if self._caches is None or self._caches[0] is not kv_layers:
            keys, values = [layer.key for layer in kv_layers], [layer.value for layer in kv_layers]
            self._caches = kv_layers, KVCaches(keys, values)
        return self._caches[1]


def has_packed_layers(weights: DecoderWeights) -> bool:
    """Return whether all projections of the layers have float16 weights that the C++ kernels have laid out."""
    return all(
        isinstance(projection, CppLinear)
        for layer in weights.layers
        for projection in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    )


def _packed(projection: Linear) -> PackedProjection:
    assert isinstance(projection, CppLinear)
    return projection.packed

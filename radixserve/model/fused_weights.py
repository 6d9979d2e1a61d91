"""Put a model's tensors into the decoder's fused layout."""

from collections.abc import Sequence
from typing import Protocol

import torch
from tqdm import tqdm

from radixserve.errors import Float16RangeError, ModelLoadError
from radixserve.model.config import ModelConfig
from radixserve.model.decoder import DecoderLayer, DecoderWeights
from radixserve.model.linear import Linear, choose_linear, float16_obstacle
from radixserve.model.precision import Precision


class TensorSource(Protocol):
    """A model's weight files. Tensors go by their Hugging Face names: model.layers.0.self_attn.q_proj.weight."""

    def names(self) -> set[str]:
        """Return the names of all tensors but those that carry no weight of the model."""

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in any float dtype, on the CPU, rows as Hugging Face orders them."""

    def describe(self, name: str) -> str:
        """Return what an error calls the tensor: the file's own name for it, and the file."""

    def rope_frequency_factors(self) -> torch.Tensor | None:
        """Return what divides the rotary frequencies, [head_dim / 2], or None."""


class FusedWeights:
    """Reads each tensor once, straight to its place in a fused one."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, *, precision: Precision, device: torch.device
    ) -> None:
        self._source = source
        self._config = config
        self._precision = precision
        self._device = device
        self._make_linear = choose_linear(precision, device)
        self._unread = source.names()

    def load(self, *, show_progress: bool) -> DecoderWeights:
        """Return all weights.

        Raises ModelLoadError for a missing, unexpected or mis-shaped tensor, Float16RangeError for one that float16
        would ruin.
        """
        config = self._config
        embedding = self._empty(config.vocab_size, config.hidden_size, dtype=self._precision.weights)
        self._read_into(embedding, "model.embed_tokens.weight")
        layers = [
            self._layer(f"model.layers.{i}")
            for i in tqdm(range(config.num_layers), desc="Loading weights", unit="layer", disable=not show_progress)
        ]
        norm = self._tensor("model.norm.weight", config.hidden_size)
        lm_head = self._make_linear(self._lm_head(embedding), None)
        if self._unread:
            raise ModelLoadError(
                f"{self._source.describe(min(self._unread))} has no place in {config.architecture}; the file holds "
                "another model than its settings say"
            )
        return DecoderWeights(embedding=embedding, layers=layers, norm=norm, lm_head=lm_head)

    def _layer(self, prefix: str) -> DecoderLayer:
        config = self._config
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return DecoderLayer(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", config.hidden_size),
            qkv=self._linear(
                [
                    (f"{prefix}.self_attn.{name}_proj", size)
                    for name, size in zip("qkv", (query_size, key_size, key_size), strict=True)
                ],
                config.hidden_size,
                has_bias=config.attention_bias,
            ),
            qk_norm=self._qk_norm(f"{prefix}.self_attn") if config.qk_norm else None,
            attention_output=self._linear(
                [(f"{prefix}.self_attn.o_proj", config.hidden_size)], query_size, has_bias=config.attention_output_bias
            ),
            mlp_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._linear(
                [(f"{prefix}.mlp.{name}_proj", config.intermediate_size) for name in ("gate", "up")],
                config.hidden_size,
                has_bias=config.mlp_bias,
            ),
            down=self._linear(
                [(f"{prefix}.mlp.down_proj", config.hidden_size)], config.intermediate_size, has_bias=config.mlp_bias
            ),
        )

    def _linear(self, parts: Sequence[tuple[str, int]], in_features: int, *, has_bias: bool) -> Linear:
        """Return the projections (name, out_features) as one, stacked along their outputs."""
        out_features = sum(size for _, size in parts)
        weight = self._empty(out_features, in_features)
        bias = self._empty(out_features) if has_bias else None
        start = 0
        for name, size in parts:
            self._read_into(weight[start : start + size], f"{name}.weight")
            if bias is not None:
                self._read_into(bias[start : start + size], f"{name}.bias")
            start += size
        return self._make_linear(weight, bias)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        config = self._config
        query_norm, key_norm = (self._tensor(f"{prefix}.{name}_norm.weight", config.head_dim) for name in "qk")
        return torch.cat((query_norm.expand(config.num_heads, -1), key_norm.expand(config.num_kv_heads, -1)))

    def _lm_head(self, embedding: torch.Tensor) -> torch.Tensor:
        """Return the output layer's weight in the activations' dtype, the embedding itself if they are tied."""
        name = "lm_head.weight"
        if not self._config.tie_word_embeddings:
            return self._tensor(name, *embedding.shape)
        if name in self._unread:
            own = self._tensor(name, *embedding.shape)
            if not torch.equal(own.to(embedding.dtype), embedding):
                raise ModelLoadError(
                    f"{self._source.describe(name)} differs from the embedding, but tie_word_embeddings is true; "
                    "set it to false in config.json if the model has an output layer of its own"
                )
        return embedding.to(self._precision.activations)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._precision.activations, device=self._device)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._empty(*shape)
        self._read_into(tensor, name)
        return tensor

    def _read_into(self, place: torch.Tensor, name: str) -> None:
        if name not in self._unread:
            raise ModelLoadError(f"{self._source.describe(name)} is missing")
        self._unread.remove(name)
        tensor = self._source.read(name)
        if tensor.shape != place.shape:
            raise ModelLoadError(
                f"{self._source.describe(name)} has shape {tuple(tensor.shape)}; "
                f"the model's settings make it {tuple(place.shape)}"
            )
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{self._source.describe(name)} holds {tensor.dtype}; quantized weights need a .gguf")
        # Of the matrices alone: vectors are kept in the activations' dtype.
        if self._precision.weights == torch.float16 and tensor.dim() == 2 and (obstacle := float16_obstacle(tensor)):
            raise Float16RangeError(f"{self._source.describe(name)} {obstacle}")
        place.copy_(tensor)

"""All layers of a decoder on a CPU, in one call."""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch

from radixserve.kernels.cpu.kv_cache import check_cache
from radixserve.kernels.cpu.library import library
from radixserve.kernels.cpu.linear import PackedProjection
from radixserve.kernels.cpu.paged_attention import AttentionPlan

# Tokens that go through the projections together: enough that reading the weights again for each of them is nothing
# beside computing, and few enough that what lies between the projections stays in the third-level cache.
_TOKENS_AT_ONCE = 256


@dataclass(slots=True, frozen=True)
class LayerWeights:
    """Weights of one layer. qkv and gate_up are fused along their outputs, in that order.

    input_norm, mlp_norm: [hidden_size]; qk_norm: [num_heads + num_kv_heads, head_dim], or None; all float32.
    """

    input_norm: torch.Tensor
    qkv: PackedProjection
    qk_norm: torch.Tensor | None
    attention_output: PackedProjection
    mlp_norm: torch.Tensor
    gate_up: PackedProjection
    down: PackedProjection


@dataclass(slots=True, frozen=True)
class LayersShape:
    """What all layers have in common."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class _Layer(Structure):
    """DecoderLayer of decoder_layers.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("attention_output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("qk_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("next_norm", c_void_p),
    )


class _Layers(Structure):
    """DecoderLayers of decoder_layers.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("first_norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate_size", c_int64),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
    )


class _Step(Structure):
    """DecoderStep of decoder_layers.h."""

    _fields_ = (
        ("plan", c_void_p),
        ("key_caches", c_void_p),
        ("value_caches", c_void_p),
        ("block_stride", c_int64),
        ("kv_head_stride", c_int64),
        ("slot_stride", c_int64),
        ("block_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("angle_stride", c_int64),
        ("slots", c_void_p),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("query", c_void_p),
        ("attended", c_void_p),
        ("projected", c_void_p),
        ("gated", c_void_p),
        ("delta", c_void_p),
        ("num_tokens", c_int64),
        ("tokens_at_once", c_int64),
    )


class KVCaches:
    """The K/V caches of all layers, as the kernel takes them: looked at once, and not at every step.

    Raises ValueError if they are not alike, or not what check_cache asks for.
    """

    def __init__(self, key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]) -> None:
        first = key_caches[0]
        for key_cache, value_cache in zip(key_caches, value_caches, strict=True):
            check_cache(key_cache, value_cache)
            if (key_cache.shape, key_cache.stride(), key_cache.dtype) != (first.shape, first.stride(), first.dtype):
                raise ValueError(
                    f"a layer has caches {key_cache.dtype} {list(key_cache.shape)} with strides {key_cache.stride()}, "
                    f"the first one {first.dtype} {list(first.shape)} with {first.stride()}; they must be alike"
                )
        self.shape = first.shape
        self.strides = first.stride()[:3]
        self.is_half = first.dtype == torch.float16
        self.keys = (c_void_p * len(key_caches))(*(cache.data_ptr() for cache in key_caches))
        self.values = (c_void_p * len(value_caches))(*(cache.data_ptr() for cache in value_caches))
        self._kept = (*key_caches, *value_caches)


class DecoderLayers:
    """The layers of a decoder, whose weights are described to the kernel once. Keeps memory for activations."""

    def __init__(self, layers: Sequence[LayerWeights], last_norm: torch.Tensor, shape: LayersShape) -> None:
        """Describe at least one layer. last_norm: [hidden_size] float32. Raises ValueError if the shapes disagree."""
        for layer in layers:
            _check_layer(layer, shape)
        _check_floats("last_norm", last_norm, (shape.hidden_size,))
        self._shape = shape
        self._kept = (*layers, last_norm)
        next_norms = [layer.input_norm for layer in layers[1:]] + [last_norm]
        self._described = (_Layer * len(layers))(*map(_describe, layers, next_norms))
        self._layers = _Layers(
            addressof(self._described),
            layers[0].input_norm.data_ptr(),
            len(layers),
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            shape.norm_eps,
            shape.head_dim**-0.5,
        )
        self._scratch = torch.empty(0)

    def run(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        caches: KVCaches,
    ) -> torch.Tensor:
        """Write the tokens' keys and values in every layer, and return their normed last hidden states.

        hidden: [T, hidden_size] float32, contiguous, the embeddings; it is overwritten. cos, sin, slot_mapping: as for
        write_kv, contiguous. plan: of the step's rows, of T tokens. The numbers are, to the last bit, those of the
        kernels called one by one: none depends on other rows or on the number of threads, which is torch's.
        Returns [T, hidden_size], contiguous. Raises ValueError if shapes, dtypes or strides disagree; slots and blocks
        beyond the caches are the caller's fault and not looked for.
        """
        self._check_step(hidden, cos, sin, slot_mapping, plan, caches)
        num_tokens = hidden.shape[0]
        tokens_at_once = min(num_tokens, _TOKENS_AT_ONCE)
        normed = torch.empty(hidden.shape, dtype=torch.float32)
        query, attended, projected, gated, delta = self._activations(num_tokens, tokens_at_once)
        step = _Step(
            addressof(plan.cut),
            addressof(caches.keys),
            addressof(caches.values),
            *caches.strides,
            caches.shape[2],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            slot_mapping.data_ptr(),
            hidden.data_ptr(),
            normed.data_ptr(),
            query.data_ptr(),
            attended.data_ptr(),
            projected.data_ptr(),
            gated.data_ptr(),
            delta.data_ptr(),
            num_tokens,
            tokens_at_once,
        )
        num_threads = torch.get_num_threads()
        if library().radixserve_decoder_layers(addressof(self._layers), addressof(step), caches.is_half, num_threads):
            raise MemoryError("no memory for attention")
        return normed

    def _activations(self, num_tokens: int, tokens_at_once: int) -> tuple[torch.Tensor, ...]:
        """Return query and attended of all tokens, and projected, gated and delta of those at once."""
        shape = self._shape
        query_size = shape.num_heads * shape.head_dim
        projected_size = max(query_size + 2 * shape.num_kv_heads * shape.head_dim, 2 * shape.intermediate_size)
        sizes = [
            num_tokens * query_size,
            num_tokens * query_size,
            tokens_at_once * projected_size,
            tokens_at_once * shape.intermediate_size,
            tokens_at_once * shape.hidden_size,
        ]
        if sum(sizes) > self._scratch.numel():
            self._scratch = torch.empty(sum(sizes), dtype=torch.float32)
        return torch.split(self._scratch[: sum(sizes)], sizes)

    def _check_step(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
        caches: KVCaches,
    ) -> None:
        shape = self._shape
        num_tokens = plan.num_tokens
        if plan.query_shape != (shape.num_heads, shape.head_dim) or plan.num_kv_heads != shape.num_kv_heads:
            raise ValueError(
                f"the plan is for queries of {list(plan.query_shape)} and {plan.num_kv_heads} K/V heads, the layers "
                f"have {[shape.num_heads, shape.head_dim]} and {shape.num_kv_heads}"
            )
        if len(caches.keys) != len(self._described) or caches.shape[1::2] != (shape.num_kv_heads, shape.head_dim):
            raise ValueError(
                f"there are {len(caches.keys)} layers' caches of {list(caches.shape)}; the {len(self._described)} "
                f"layers have {shape.num_kv_heads} K/V heads of {shape.head_dim}"
            )
        for name, tensor, expected in (
            ("hidden", hidden, (num_tokens, shape.hidden_size)),
            ("cos", cos, (num_tokens, shape.head_dim // 2)),
            ("sin", sin, (num_tokens, shape.head_dim // 2)),
        ):
            _check_floats(name, tensor, expected)
        if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
            raise ValueError(
                f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}; it must be int64 {[num_tokens]}, "
                "contiguous"
            )


def _describe(layer: LayerWeights, next_norm: torch.Tensor) -> _Layer:
    return _Layer(
        addressof(layer.qkv.projection),
        addressof(layer.attention_output.projection),
        addressof(layer.gate_up.projection),
        addressof(layer.down.projection),
        None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        next_norm.data_ptr(),
    )


def _check_layer(layer: LayerWeights, shape: LayersShape) -> None:
    query_size, key_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for name, packed, in_features, out_features in (
        ("qkv", layer.qkv, shape.hidden_size, query_size + 2 * key_size),
        ("attention_output", layer.attention_output, query_size, shape.hidden_size),
        ("gate_up", layer.gate_up, shape.hidden_size, 2 * shape.intermediate_size),
        ("down", layer.down, shape.intermediate_size, shape.hidden_size),
    ):
        if (packed.in_features, packed.out_features) != (in_features, out_features):
            raise ValueError(
                f"{name} takes {packed.in_features} to {packed.out_features} features; it must take {in_features} to "
                f"{out_features}"
            )
    _check_floats("input_norm", layer.input_norm, (shape.hidden_size,))
    _check_floats("mlp_norm", layer.mlp_norm, (shape.hidden_size,))
    if layer.qk_norm is not None:
        _check_floats("qk_norm", layer.qk_norm, (shape.num_heads + shape.num_kv_heads, shape.head_dim))


def _check_floats(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be float32 {list(shape)} on "
            "the CPU, contiguous"
        )

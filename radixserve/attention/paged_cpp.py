"""Attention over the paged K/V cache with the C++ kernels: for CPUs."""

from dataclasses import dataclass

import torch

from radixserve.attention.backend import ForwardBatch, KVLayer, Rotation
from radixserve.attention.block_copy import copy_blocks
from radixserve.kernels.cpu.paged_attention import AttentionPlan, paged_attention, plan_attention
from radixserve.kernels.cpu.write_kv import write_kv


@dataclass(slots=True, frozen=True)
class PagedCppMetadata:
    """A step's plan. slot_mapping: [T] int64, the slot of each new token."""

    slot_mapping: torch.Tensor
    plan: AttentionPlan


class PagedCppBackend:
    """Implements AttentionBackend with the C++ kernels: float32 activations over float32 or float16 K/V.

    Slots that a row's context does not reach are never read. Blocks that rows share are read once for them, where that
    is faster. A row's numbers do not depend on the other rows of a step, nor on the number of threads.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size

    def prepare(self, batch: ForwardBatch) -> PagedCppMetadata:
        """Return the plan of a step, shared by all layers."""
        plan = plan_attention(
            batch.query_lengths,
            batch.context_lengths,
            batch.block_tables,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            block_size=self._block_size,
        )
        return PagedCppMetadata(batch.slot_mapping, plan)

    def write_kv(
        self,
        layer: KVLayer,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        metadata: PagedCppMetadata,
    ) -> torch.Tensor:
        """Write the step's rotated keys and its values into their slots, in place; return the rotated queries."""
        return write_kv(query_key, value, rotation.cos, rotation.sin, layer.key, layer.value, metadata.slot_mapping)

    def forward(self, layer: KVLayer, query: torch.Tensor, metadata: PagedCppMetadata) -> torch.Tensor:
        """Return causal attention of query [T, num_heads, head_dim] over each row's whole context: same shape."""
        return paged_attention(query, layer.key, layer.value, metadata.plan, scale=self._head_dim**-0.5)

    def copy_blocks(self, layers: list[KVLayer], sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any destination is written."""
        copy_blocks(layers, sources, destinations)

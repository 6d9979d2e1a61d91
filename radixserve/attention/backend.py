"""The one interface of all attention backends, and the batch they read.

K/V layout, fixed for every backend: for each layer two tensors [num_blocks, num_kv_heads, block_size, head_dim],
keys already rotated. Position p of a sequence lies in block block_table[p // block_size] at offset p % block_size.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True, frozen=True)
class KVLayer:
    """Keys and values of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """A step's rows as tensors. R rows, T tokens, S of them with logits.

    token_ids, positions: [T] int64, rows one after another.
    slot_mapping: [T] int64, block_id * block_size + offset of each token.
    query_lengths, context_lengths: [R]; a row's context includes its query, so context >= query >= 1.
    block_tables: [R, max_blocks] int64, padded with 0, on the host as the lengths are: plans are made of them, and a
    backend brings to its device what its kernels read.
    logits_indices: [S] int64, the tokens whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_lengths: list[int]
    context_lengths: list[int]
    block_tables: torch.Tensor
    logits_indices: torch.Tensor


@dataclass(slots=True, frozen=True)
class Rotation:
    """How far the rotary position embedding turns each token's heads. cos, sin: [T, head_dim / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


class AttentionBackend(Protocol):
    """Writes and reads the paged K/V cache. Attention reads K/V in the dtype they are stored in, the step's own too."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """Return the metadata that write_kv and forward take, computed once for all layers of a step."""

    def write_kv(
        self, layer: KVLayer, query_key: torch.Tensor, value: torch.Tensor, rotation: Rotation, metadata: Any
    ) -> torch.Tensor:
        """Rotate the step's queries and keys; write its keys and values into their slots, in place.

        query_key: [T, num_heads + num_kv_heads, head_dim], one tensor with the queries' heads first, so that one call
        rotates both. value: [T, num_kv_heads, head_dim]. Both may be views of a projection's output, contiguous in the
        last axis. Returns the rotated queries [T, num_heads, head_dim], in query_key's dtype.
        """

    def forward(self, layer: KVLayer, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return causal attention of query [T, num_heads, head_dim] over each row's whole context: same shape.

        The scale is head_dim ** -0.5. The step's own K/V have been written before.
        """

    def copy_blocks(self, layers: list[KVLayer], sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any destination is written.

        No block is a destination twice; it may be a source too. The ids come as integers, so that a backend can see
        without waiting for its device whether the order of the copies matters.
        """

"""Attention over the paged K/V cache with the Triton kernels: for GPUs, and under Triton's interpreter for tests."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixserve.attention.backend import ForwardBatch, KVLayer, Rotation
from radixserve.errors import ConfigError
from radixserve.kernels.copy_blocks import copy_blocks
from radixserve.kernels.paged_decode import DecodePlan, find_decode_runs, paged_decode, plan_decode
from radixserve.kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill, tokens_per_tile
from radixserve.kernels.shared_runs import SharedRun
from radixserve.kernels.tiles import MAX_GROUP_SIZE, check_supported, decode_tiles, target_family
from radixserve.kernels.write_kv import write_kv


@dataclass(slots=True, frozen=True)
class PagedTritonMetadata:
    """A step's plans; None where it has no such rows. slot_mapping: [T] int64, the slot of each new token."""

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    decode: DecodePlan | None
    prefill: PrefillPlan | None


class PagedTritonBackend:
    """Implements AttentionBackend with the Triton kernels, on a GPU or under TRITON_INTERPRET=1.

    Slots that a row's context does not reach are never read. Splits that rows of one token share are read once for as
    many of them as fit a tile. Raises ConfigError for a model or a dtype that the kernels do not take, so that no step
    ever meets one.
    """

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int
    ) -> None:
        try:
            check_supported(head_dim, dtype)
        except ValueError as error:
            raise ConfigError(f"--attention-backend triton: {error}; give --attention-backend torch") from None
        group_size = num_heads // num_kv_heads
        if group_size > MAX_GROUP_SIZE:
            raise ConfigError(
                f"--attention-backend triton: {group_size} query heads share a K/V head, and the kernels take at most "
                f"{MAX_GROUP_SIZE}; give --attention-backend torch"
            )
        self._block_size = block_size
        self._group_size = group_size
        self._split_tokens = decode_tiles(head_dim, dtype, target_family()).split_tokens
        self._tokens_per_tile = tokens_per_tile(head_dim, dtype, group_size)

    def prepare(self, batch: ForwardBatch) -> PagedTritonMetadata:
        """Return the plans of a step, shared by all layers."""
        starts = np.cumsum([0, *batch.query_lengths[:-1]])
        query_lengths, context_lengths = np.asarray(batch.query_lengths), np.asarray(batch.context_lengths)
        decodes, prefills = np.flatnonzero(query_lengths == 1), np.flatnonzero(query_lengths > 1)
        return PagedTritonMetadata(
            slot_mapping=batch.slot_mapping,
            block_tables=batch.block_tables.to(batch.slot_mapping.device),
            decode=self._plan_decode(batch, decodes, starts[decodes], context_lengths[decodes])
            if len(decodes)
            else None,
            prefill=plan_prefill(
                prefills,
                starts[prefills],
                query_lengths[prefills],
                context_lengths[prefills],
                tokens_per_tile=self._tokens_per_tile,
                device=batch.slot_mapping.device,
            )
            if len(prefills)
            else None,
        )

    def _plan_decode(
        self,
        batch: ForwardBatch,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        context_lengths: NDArray[np.int64],
    ) -> DecodePlan:
        runs: list[SharedRun] = []
        if np.count_nonzero(context_lengths > self._split_tokens) > 1:
            runs = find_decode_runs(
                batch.block_tables.numpy()[rows],
                context_lengths,
                block_size=self._block_size,
                split_tokens=self._split_tokens,
                group_size=self._group_size,
            )
        return plan_decode(
            rows,
            tokens,
            context_lengths,
            split_tokens=self._split_tokens,
            device=batch.slot_mapping.device,
            runs=runs,
            group_size=self._group_size,
        )

    def write_kv(
        self,
        layer: KVLayer,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        metadata: PagedTritonMetadata,
    ) -> torch.Tensor:
        """Write the step's rotated keys and its values into their slots, in place; return the rotated queries."""
        return write_kv(query_key, value, rotation.cos, rotation.sin, layer.key, layer.value, metadata.slot_mapping)

    def forward(self, layer: KVLayer, query: torch.Tensor, metadata: PagedTritonMetadata) -> torch.Tensor:
        """Return causal attention of query [T, num_heads, head_dim] over each row's whole context: same shape."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scale = query.shape[-1] ** -0.5
        arguments = (query, layer.key, layer.value, metadata.block_tables)
        if metadata.decode is not None:
            paged_decode(*arguments, metadata.decode, output, scale=scale)
        if metadata.prefill is not None:
            paged_prefill(*arguments, metadata.prefill, output, scale=scale)
        return output

    def copy_blocks(self, layers: list[KVLayer], sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any destination is written."""
        copy_blocks([cache for layer in layers for cache in (layer.key, layer.value)], sources, destinations)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the kernels can run on this device in this dtype."""
    if device.type == "cuda":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"--attention-backend triton needs a GPU, and the model runs on the {device.type}; give "
            "--attention-backend torch, or set TRITON_INTERPRET=1 to try the kernels in Triton's very slow interpreter"
        )
    if dtype == torch.bfloat16:
        raise ConfigError(
            "--dtype bfloat16 gives wrong numbers in Triton's interpreter; give --dtype float32 or --dtype float16"
        )

"""Attention over the paged K/V cache with torch alone: gather a row's blocks, then one scaled dot product."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from radixserve.attention.backend import ForwardBatch, KVLayer, Rotation
from radixserve.attention.block_copy import copy_blocks
from radixserve.kernels.reference import rope


@dataclass(slots=True, frozen=True)
class DecodeBucket:
    """Rows of one new token each, and of similar context lengths, that are computed together.

    tokens: [R] int64, where their queries are in the step, or None if they are the whole step in order.
    gather: [R * num_kv_heads * width] int64 into the cache seen as [num_blocks * num_kv_heads, ...].
    mask: [R, 1, 1, width * block_size] bool, True where a slot is part of the row's context.
    """

    tokens: torch.Tensor | None
    gather: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True, frozen=True)
class PrefillRow:
    """One row of several new tokens.

    tokens: where its queries are in the step. gather: [num_kv_heads * num_blocks] int64, as in DecodeBucket.
    mask: [query_length, context_length] bool, or None when nothing of the row was computed before.
    """

    tokens: slice
    gather: torch.Tensor
    context_length: int
    mask: torch.Tensor | None


@dataclass(slots=True, frozen=True)
class PagedSdpaMetadata:
    """A step's indices and masks. block_ids, offsets: [T] int64, the slot of each new token."""

    block_ids: torch.Tensor
    offsets: torch.Tensor
    decodes: list[DecodeBucket]
    prefills: list[PrefillRow]


class PagedSdpaBackend:
    """Implements AttentionBackend with torch alone, on any device.

    Slots that a row's context does not reach are read and masked, so they must hold finite numbers: allocate the
    cache with zeros. Only blocks of the row itself are ever read for it, so that a NaN in one row stays there.
    """

    def __init__(self, *, block_size: int, num_kv_heads: int) -> None:
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads

    def prepare(self, batch: ForwardBatch) -> PagedSdpaMetadata:
        """Return the indices and masks of a step, shared by all layers."""
        tables = batch.block_tables.to(batch.slot_mapping.device)
        buckets: dict[int, list[int]] = {}
        prefills = []
        starts = []
        start = 0
        for row, (query_length, context_length) in enumerate(
            zip(batch.query_lengths, batch.context_lengths, strict=True)
        ):
            starts.append(start)
            if query_length == 1:
                # One bucket a power of two, so that padding never doubles what is read.
                buckets.setdefault((self._num_blocks(context_length) - 1).bit_length(), []).append(row)
            else:
                prefills.append(self._prefill_row(tables[row : row + 1], start, query_length, context_length))
            start += query_length
        return PagedSdpaMetadata(
            block_ids=batch.slot_mapping // self.block_size,
            offsets=batch.slot_mapping % self.block_size,
            decodes=[self._decode_bucket(batch, tables, rows, starts) for rows in buckets.values()],
            prefills=prefills,
        )

    def write_kv(
        self,
        layer: KVLayer,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        metadata: PagedSdpaMetadata,
    ) -> torch.Tensor:
        """Write the step's rotated keys and its values into their slots, in place; return the rotated queries."""
        num_heads = query_key.shape[1] - self.num_kv_heads
        rotated = rope(query_key, rotation.cos, rotation.sin)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        layer.key[metadata.block_ids, :, metadata.offsets] = key.to(layer.key.dtype)
        layer.value[metadata.block_ids, :, metadata.offsets] = value.to(layer.value.dtype)
        return query

    def forward(self, layer: KVLayer, query: torch.Tensor, metadata: PagedSdpaMetadata) -> torch.Tensor:
        """Return causal attention of query [T, num_heads, head_dim] over each row's whole context: same shape."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for bucket in metadata.decodes:
            if bucket.tokens is None:
                return self._decode(layer, query, bucket)
            output[bucket.tokens] = self._decode(layer, query[bucket.tokens], bucket)
        for row in metadata.prefills:
            output[row.tokens] = self._prefill(layer, query[row.tokens], row)
        return output

    def copy_blocks(self, layers: list[KVLayer], sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any destination is written."""
        copy_blocks(layers, sources, destinations)

    def _num_blocks(self, context_length: int) -> int:
        return -(-context_length // self.block_size)

    def _decode_bucket(
        self, batch: ForwardBatch, tables: torch.Tensor, rows: list[int], starts: list[int]
    ) -> DecodeBucket:
        device = tables.device
        contexts = torch.tensor([batch.context_lengths[row] for row in rows], device=device)
        widths = [self._num_blocks(batch.context_lengths[row]) for row in rows]
        columns = torch.arange(max(widths), device=device)
        tables = tables[torch.tensor(rows, device=device), : max(widths)]
        # A shorter row is padded with its own first block: another row's could hold NaN, which no mask stops.
        tables = torch.where(columns < torch.tensor(widths, device=device).unsqueeze(1), tables, tables[:, :1])
        slots = torch.arange(max(widths) * self.block_size, device=device)
        return DecodeBucket(
            tokens=None
            if len(rows) == batch.token_ids.shape[0]
            else torch.tensor([starts[row] for row in rows], device=device),
            gather=self._gather_index(tables),
            mask=(slots < contexts.unsqueeze(1))[:, None, None, :],
        )

    def _prefill_row(self, table: torch.Tensor, start: int, query_length: int, context_length: int) -> PrefillRow:
        mask = None
        if query_length < context_length:
            # Aligned at the bottom right: the last query sees the whole context. SDPA's is_causal aligns at the top.
            mask = torch.ones(query_length, context_length, dtype=torch.bool, device=table.device)
            mask = mask.tril(context_length - query_length)
        return PrefillRow(
            tokens=slice(start, start + query_length),
            gather=self._gather_index(table[:, : self._num_blocks(context_length)]),
            context_length=context_length,
            mask=mask,
        )

    def _gather_index(self, tables: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.num_kv_heads, device=tables.device)
        return (tables.unsqueeze(1) * self.num_kv_heads + heads.unsqueeze(1)).flatten()  # [R * KV * width]

    def _gather(self, cache: torch.Tensor, index: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [num_rows, num_kv_heads, width * block_size, head_dim], in one copy that no transpose follows."""
        head_dim = cache.shape[3]
        return (
            cache.view(-1, self.block_size * head_dim)
            .index_select(0, index)
            .view(num_rows, self.num_kv_heads, -1, head_dim)
            .to(dtype)
        )

    def _decode(self, layer: KVLayer, query: torch.Tensor, bucket: DecodeBucket) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        # The heads that share a K/V head become its queries, so no key is repeated: [R, KV, H / KV, D].
        grouped = query.reshape(num_rows, self.num_kv_heads, num_heads // self.num_kv_heads, head_dim)
        keys = self._gather(layer.key, bucket.gather, num_rows, query.dtype)
        values = self._gather(layer.value, bucket.gather, num_rows, query.dtype)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask).reshape(query.shape)

    def _prefill(self, layer: KVLayer, query: torch.Tensor, row: PrefillRow) -> torch.Tensor:
        keys = self._gather(layer.key, row.gather, 1, query.dtype)[:, :, : row.context_length]
        values = self._gather(layer.value, row.gather, 1, query.dtype)[:, :, : row.context_length]
        output = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),  # [1, H, Q, D]
            keys,
            values,
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )
        return output.squeeze(0).transpose(0, 1)

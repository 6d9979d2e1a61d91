"""Drive a Decoder as the runner does: sequences over scattered blocks, some tokens of each in a step."""

import torch

from radixserve.attention.backend import AttentionBackend, ForwardBatch, KVLayer
from radixserve.attention.paged_sdpa import PagedSdpaBackend
from radixserve.model.decoder import Decoder

BLOCK_SIZE = 16


class PagedSequences:
    """Sequences with K/V in shuffled blocks of one cache; slots that were never written hold ones, not zeros.

    dtype: of the K/V. attention: the torch backend unless given.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_sequences: int,
        max_length: int,
        *,
        dtype: torch.dtype = torch.float32,
        attention: AttentionBackend | None = None,
    ) -> None:
        config = decoder.config
        blocks = -(-max_length // BLOCK_SIZE)
        shape = (num_sequences * blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        shuffled = torch.randperm(num_sequences * blocks, generator=torch.Generator().manual_seed(7))
        self._tables = shuffled.view(num_sequences, blocks)
        self._lengths = [0] * num_sequences
        self._kv_layers = [
            KVLayer(torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)) for _ in range(config.num_layers)
        ]
        self._decoder = decoder
        self._attention: AttentionBackend = attention or PagedSdpaBackend(
            block_size=BLOCK_SIZE, num_kv_heads=config.num_kv_heads
        )

    def step(self, rows: dict[int, list[int]], wanted: list[int] | None = None) -> dict[int, torch.Tensor]:
        """Append tokens to some sequences; return the logits of each new token, [num_tokens, vocab_size].

        wanted: for a step of one row, the only tokens whose logits are returned.
        """
        tokens, positions, slots = [], [], []
        for sequence, new_tokens in rows.items():
            start = self._lengths[sequence]
            self._lengths[sequence] += len(new_tokens)
            row_positions = torch.arange(start, self._lengths[sequence])
            tokens += new_tokens
            positions.append(row_positions)
            slots.append(self._tables[sequence][row_positions // BLOCK_SIZE] * BLOCK_SIZE + row_positions % BLOCK_SIZE)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            query_lengths=[len(new_tokens) for new_tokens in rows.values()],
            context_lengths=[self._lengths[sequence] for sequence in rows],
            block_tables=self._tables[list(rows)],
            logits_indices=torch.arange(len(tokens)) if wanted is None else torch.tensor(wanted, dtype=torch.int64),
        )
        logits = self._decoder.forward(batch, self._kv_layers, self._attention)
        if wanted is not None:
            return dict.fromkeys(rows, logits)
        return dict(zip(rows, logits.split([len(new_tokens) for new_tokens in rows.values()]), strict=True))

    def poison(self, sequence: int) -> None:
        """Turn the keys and values of a sequence into NaN."""
        for layer in self._kv_layers:
            layer.key[self._tables[sequence]] = torch.nan
            layer.value[self._tables[sequence]] = torch.nan

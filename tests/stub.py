"""A model that is a table: next-token probabilities as a function of the context that the K/V cache holds.

The stub keeps a *shadow* of the K/V storage: each slot remembers the token it was computed from and a hash of the whole
prefix up to it. A row's context is read back through its block table and checked against that, so a slot that was
overwritten, never written, or shared wrongly fails the test at once; and only what was read decides the next token.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from radixserve.core.batch import SampledTokens, ScheduledBatch, ScheduledRow
from radixserve.core.block_store import BlockBytes
from radixserve.protocol import TokenLogprobs
from radixserve.sampling.beam_candidates import beam_candidates
from radixserve.sampling.logprobs import score_tokens
from radixserve.sampling.sampler import sample

# The probability, after a context, of each token that has any.
Table = Callable[[Sequence[int]], Mapping[int, float]]

_NOTHING = (-1, 0)
# A slot outside of the stub: two 64-bit integers.
SLOT_BYTES = 16


class StubExecutor:
    """An Executor over a table. fail_on: contexts at which the step raises. poison: at which the logits are NaN."""

    def __init__(
        self,
        table: Table,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        fail_on: Callable[[Sequence[int]], bool] = lambda _: False,
        poison: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._fail_on = fail_on
        self._poison = poison
        self._slots = [[_NOTHING] * block_size for _ in range(num_blocks)]
        self.batches: list[ScheduledBatch] = []

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        self.batches.append(batch)
        spilled = self._pack(batch.spills) if batch.spills else None
        if batch.loads is not None:
            self._unpack(batch.loads.block_ids, batch.loads.blocks)
        sources = [list(self._slots[copy.source]) for copy in batch.copies]
        for copy, source in zip(batch.copies, sources, strict=True):
            self._slots[copy.destination] = source
        for row in batch.rows:
            self._write(row)
        rows, slots, is_finite = [], [], []
        prompt_logprobs = {}
        for index, row in enumerate(batch.rows):
            context = self._read(row)
            if self._fail_on(context):
                raise RuntimeError("the stub was told to fail here")
            is_finite.append(not self._poison(context))
            rows += [self._logits(context)] * len(row.samples)
            slots += row.samples
            if row.prompt_targets and is_finite[-1]:
                prompt_logprobs[index] = self._score(row, context)
        logits = torch.tensor(rows, dtype=torch.float32).reshape(-1, self._vocab_size)
        token_ids, logprobs = sample(logits, slots)
        candidates = beam_candidates(logits, slots)
        return SampledTokens(token_ids, logprobs, is_finite, prompt_logprobs, candidates, spilled)

    def _pack(self, block_ids: Sequence[int]) -> BlockBytes:
        slots = np.array([self._slots[block_id] for block_id in block_ids], np.int64)
        return slots.view(np.uint8).reshape(len(block_ids), SLOT_BYTES * self._block_size)

    def _unpack(self, block_ids: Sequence[int], blocks: BlockBytes) -> None:
        slots = np.ascontiguousarray(blocks).view(np.int64).reshape(len(block_ids), self._block_size, 2).tolist()
        for block_id, block in zip(block_ids, slots, strict=True):
            self._slots[block_id] = [(token_id, prefix) for token_id, prefix in block]

    def _score(self, row: ScheduledRow, context: Sequence[int]) -> list[TokenLogprobs]:
        ends = range(row.num_computed_tokens + 1, row.num_computed_tokens + 1 + len(row.prompt_targets))
        logits = torch.tensor([self._logits(context[:end]) for end in ends])
        return score_tokens(logits, row.prompt_targets, [row.num_prompt_logprobs] * len(row.prompt_targets))

    def _logits(self, context: Sequence[int]) -> list[float]:
        logits = [-1e4] * self._vocab_size
        for token_id, probability in self._table(context).items():
            logits[token_id] = math.log(probability)
        return logits

    def _write(self, row: ScheduledRow) -> None:
        start = row.num_computed_tokens
        prefix = self._slot(row, start - 1)[1] if start > 0 else 0
        for position, token_id in enumerate(row.token_ids, start=start):
            prefix = hash((prefix, token_id))
            block_id = row.block_table[position // self._block_size]
            self._slots[block_id][position % self._block_size] = (token_id, prefix)

    def _read(self, row: ScheduledRow) -> list[int]:
        context, prefix = [], 0
        for position in range(row.num_computed_tokens + len(row.token_ids)):
            token_id, stored = self._slot(row, position)
            prefix = hash((prefix, token_id))
            assert stored == prefix, f"position {position} holds K/V of another prefix"
            context.append(token_id)
        for slot in row.samples:
            assert context == list(slot.token_ids), "a row draws from another context than its sequence has"
        return context

    def _slot(self, row: ScheduledRow, position: int) -> tuple[int, int]:
        return self._slots[row.block_table[position // self._block_size]][position % self._block_size]


def always(token_id: int) -> Table:
    """A model that says one token for ever."""
    return lambda _: {token_id: 1.0}


def counting(vocab_size: int) -> Table:
    """A model whose next token depends on the whole context, so that a wrong context shows in the answer."""
    return lambda context: {hash(tuple(context)) % vocab_size: 1.0}

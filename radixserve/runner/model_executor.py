"""The executor that runs a real model."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from radixserve.attention.backend import AttentionBackend, ForwardBatch, KVLayer
from radixserve.core.batch import BlockCopy, SampledTokens, SampleSlot, ScheduledBatch
from radixserve.model.decoder import Decoder
from radixserve.protocol import TokenLogprobs
from radixserve.runner.block_transfer import copy_in, copy_out
from radixserve.runner.forward_batch import build_forward_batch
from radixserve.runner.prompt_scoring import score_prompts
from radixserve.sampling.beam_candidates import beam_candidates
from radixserve.sampling.sampler import sample


class ModelExecutor:
    """Implements Executor with a decoder on one device. Owns the K/V storage.

    Numbers are judged by the logits of each row's last token, also while its prompt is still being computed. That
    token attends to the whole context in every layer, so a NaN anywhere in the row's K/V shows there, in the step in
    which it arose and before the scheduler commits the blocks. It costs one row of the output projection a chunk.

    num_threads: of the CPU that compute; None leaves it to torch.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_layers: list[KVLayer],
        attention: AttentionBackend,
        *,
        num_threads: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv_layers = kv_layers
        self._attention = attention
        self._block_size = kv_layers[0].key.shape[2]
        self._device = kv_layers[0].key.device
        self._num_threads = num_threads

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """See Executor.execute. A row whose logits are not finite gets token 0 and no logprobs in all its slots."""
        # Each thread of Python has a number of its own, and the one that loaded the model may be another than this.
        if self._num_threads is not None and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            spilled = copy_out(self._kv_layers, batch.spills) if batch.spills else None
            if batch.loads is not None:
                copy_in(self._kv_layers, *batch.loads)
            if batch.copies:
                self._copy_blocks(batch.copies)
            if not batch.rows:
                return SampledTokens(token_ids=[], logprobs=[], is_finite=[], spilled=spilled)
            forward_batch = build_forward_batch(batch, self._block_size, self._device)
            hidden = self._decoder.hidden_states(forward_batch, self._kv_layers, self._attention)  # [T, hidden_size]
            logits = self._decoder.logits(hidden.index_select(0, forward_batch.logits_indices))  # [R, vocab]
            # The extremes of a row with a NaN are NaN; two reductions read it faster than isfinite().all() does.
            is_finite = (logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()).tolist()
            scores = score_prompts(batch.rows, hidden, self._decoder.logits)
            is_finite = [is_good and scores.get(index, []) is not None for index, is_good in enumerate(is_finite)]
            if not all(is_finite):
                self._zero_written_slots(forward_batch, is_finite)
            prompt_logprobs = {index: entries for index, entries in scores.items() if entries and is_finite[index]}
            return replace(self._sample(batch, logits, is_finite, prompt_logprobs), spilled=spilled)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        sources = [copy.source for copy in copies]
        destinations = [copy.destination for copy in copies]
        self._attention.copy_blocks(self._kv_layers, sources, destinations)

    def _zero_written_slots(self, forward_batch: ForwardBatch, is_finite: list[bool]) -> None:
        """Zero what the bad rows wrote: a masked slot still enters a product, and 0 times NaN is NaN."""
        lengths = torch.tensor(forward_batch.query_lengths, device=self._device)
        is_bad = ~torch.tensor(is_finite, device=self._device).repeat_interleave(lengths)  # [T]
        slots = forward_batch.slot_mapping[is_bad]
        block_ids, offsets = slots // self._block_size, slots % self._block_size
        for layer in self._kv_layers:
            layer.key[block_ids, :, offsets] = 0
            layer.value[block_ids, :, offsets] = 0

    def _sample(
        self,
        batch: ScheduledBatch,
        logits: torch.Tensor,
        is_finite: list[bool],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> SampledTokens:
        slots: list[SampleSlot] = []
        row_of_slot: list[int] = []
        is_drawn: list[bool] = []
        for index, row in enumerate(batch.rows):
            is_drawn += [is_finite[index]] * len(row.samples)
            if is_finite[index]:
                slots += row.samples
                row_of_slot += [index] * len(row.samples)
        if row_of_slot != list(range(len(batch.rows))):
            logits = logits.index_select(0, torch.tensor(row_of_slot, dtype=torch.int64, device=self._device))
        drawn_ids, drawn_logprobs = sample(logits, slots)
        token_ids: list[int] = [0] * len(is_drawn)
        logprobs: list[TokenLogprobs | None] = [None] * len(is_drawn)
        candidates: list[list[tuple[int, float]] | None] = [None] * len(is_drawn)
        drawn = [position for position, is_in in enumerate(is_drawn) if is_in]
        for position, token_id, entry in zip(drawn, drawn_ids, drawn_logprobs, strict=True):
            token_ids[position], logprobs[position] = token_id, entry
        for position, best in zip(drawn, beam_candidates(logits, slots), strict=True):
            candidates[position] = best
        return SampledTokens(token_ids, logprobs, is_finite, prompt_logprobs, candidates)

"""What requests do to logits before the temperature.

In this order, each for the slots that ask for it:

    logit_bias            added
    repetition_penalty    ids of prompt and output: a negative logit is multiplied by it, another divided
    frequency_penalty,    ids of the output: frequency times their count and, once for any count, presence
    presence_penalty      are subtracted
    suppressed ids        minus infinity
    not allowed ids       minus infinity

Counts are taken anew from the sequence at each step, so no state has to survive a preemption. All work is sparse: the
cost is that of the ids touched, whatever the vocabulary, apart from one count per penalised slot.
"""

from collections.abc import Sequence

import numpy as np
import torch

from radixserve.core.batch import SampleSlot
from radixserve.sampling.token_mask import mask_tokens


def apply_processors(logits: torch.Tensor, slots: Sequence[SampleSlot]) -> torch.Tensor:
    """Return the logits that the slots draw from: `logits` itself if no slot changes any, else a changed copy.

    logits: [num_slots, vocab], finite. Every row of the result has a finite entry, and none is NaN or +infinity.
    """
    biased = [row for row, slot in enumerate(slots) if slot.params.logit_bias]
    penalised = [row for row, slot in enumerate(slots) if slot.params.has_penalties]
    suppressed = [row for row, slot in enumerate(slots) if slot.suppressed_token_ids and slot.allowed_tokens is None]
    constrained = [row for row, slot in enumerate(slots) if slot.allowed_tokens is not None]
    if not (biased or penalised or suppressed or constrained):
        return logits
    logits = logits.clone()
    if biased:
        _add_biases(logits, slots, biased)
    if penalised:
        _subtract_penalties(logits, slots, penalised)
    if suppressed:
        _suppress(logits, slots, suppressed)
    if constrained:
        mask_tokens(logits, slots, constrained)
    return logits


def _add_biases(logits: torch.Tensor, slots: Sequence[SampleSlot], rows: list[int]) -> None:
    vocab_size = logits.shape[1]
    entries = [
        (row, token_id, bias)
        for row in rows
        for token_id, bias in slots[row].params.logit_bias.items()
        if 0 <= token_id < vocab_size
    ]
    if entries:
        at_rows, at_ids, biases = zip(*entries, strict=True)
        where = _to_index(at_rows, logits), _to_index(at_ids, logits)
        logits[where] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _subtract_penalties(logits: torch.Tensor, slots: Sequence[SampleSlot], rows: list[int]) -> None:
    vocab_size = logits.shape[1]
    all_ids, all_factors, all_costs = [], [], []
    for row in rows:
        slot, params = slots[row], slots[row].params
        token_ids = np.asarray(slot.token_ids)
        output_counts = np.bincount(token_ids[slot.num_prompt_tokens :], minlength=vocab_size)[:vocab_size]
        seen = output_counts
        if params.repetition_penalty != 1.0:
            seen = np.bincount(token_ids, minlength=vocab_size)[:vocab_size]
        ids = np.flatnonzero(seen)
        counts = output_counts[ids]
        all_ids.append(ids)
        all_factors.append(np.full(len(ids), params.repetition_penalty))
        all_costs.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    at_rows = np.repeat(rows, [len(ids) for ids in all_ids])
    where = _to_index(at_rows, logits), _to_index(np.concatenate(all_ids), logits)
    factors = torch.from_numpy(np.concatenate(all_factors)).to(logits.device)
    costs = torch.from_numpy(np.concatenate(all_costs)).to(logits.device)
    # In float64, and clamped: a tiny factor is 0 in float32, and divides a large logit past its range.
    values = logits[where].double()
    values = torch.where(values < 0, values * factors, values / factors) - costs
    limits = torch.finfo(logits.dtype)
    logits[where] = values.clamp(limits.min, limits.max).to(logits.dtype)


def _suppress(logits: torch.Tensor, slots: Sequence[SampleSlot], rows: list[int]) -> None:
    vocab_size = logits.shape[1]
    at_rows: list[int] = []
    at_ids: list[int] = []
    for row in rows:
        ids = {token_id for token_id in slots[row].suppressed_token_ids if 0 <= token_id < vocab_size}
        # Some token has to be drawn: ids that leave none are not suppressed.
        if len(ids) < vocab_size:
            at_rows += [row] * len(ids)
            at_ids += ids
    if at_ids:
        logits[_to_index(at_rows, logits), _to_index(at_ids, logits)] = -torch.inf


def _to_index(values: "Sequence[int] | np.typing.NDArray[np.int64]", like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=like.device)

"""The best next tokens of beams."""

from collections.abc import Sequence

import torch

from radixserve.core.batch import SampleSlot
from radixserve.sampling.processors import apply_processors
from radixserve.sampling.top_tokens import top_tokens


def beam_candidates(logits: torch.Tensor, slots: Sequence[SampleSlot]) -> list[list[tuple[int, float]] | None]:
    """Return (token id, log-probability) of the num_candidates best tokens of each slot that asks for any, else None.

    logits: [num_slots, vocab] float32, finite, not changed. Biases, penalties and suppression are applied to the
    log-probabilities, which are not normalised again. Best first, the lower id first among equals; fewer if so many
    tokens cannot be drawn.
    Source: the order of log_softmax and processors is that of transformers' beam search.
    """
    results: list[list[tuple[int, float]] | None] = [None] * len(slots)
    asking = [row for row, slot in enumerate(slots) if slot.num_candidates]
    if not asking:
        return results
    beams = [slots[row] for row in asking]
    logprobs = logits.index_select(0, torch.tensor(asking, device=logits.device)).log_softmax(dim=-1)
    most = min(max(beam.num_candidates for beam in beams), logits.shape[1])
    values, ids = top_tokens(apply_processors(logprobs, beams), most)  # [N, most]
    for row, beam, best, best_ids in zip(asking, beams, values.tolist(), ids.tolist(), strict=True):
        pairs = zip(best_ids[: beam.num_candidates], best, strict=False)
        results[row] = [(token_id, logprob) for token_id, logprob in pairs if logprob > -torch.inf]
    return results

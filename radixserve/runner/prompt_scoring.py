"""Score the tokens of prompts from the hidden states of the step that computes them."""

from collections.abc import Callable, Sequence

import torch

from radixserve.core.batch import ScheduledRow
from radixserve.protocol import TokenLogprobs
from radixserve.sampling.logprobs import score_tokens

# A chunk of 500 tokens has 100 MB of float32 logits over a vocabulary of 50,000, and twice that in float64.
_POSITIONS_AT_A_TIME = 64


def score_prompts(
    rows: Sequence[ScheduledRow], hidden: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, list[TokenLogprobs] | None]:
    """Return the entries of each row that has prompt_targets, by its index; None where a logit was not finite.

    hidden: [T, hidden_size], the rows behind one another. to_logits: [N, hidden_size] to [N, vocab] float32.
    """
    indices: list[int] = []
    targets: list[int] = []
    counts: list[int] = []
    offset = 0
    for row in rows:
        num_targets = len(row.prompt_targets)
        indices += range(offset, offset + num_targets)
        targets += row.prompt_targets
        counts += [row.num_prompt_logprobs] * num_targets
        offset += len(row.token_ids)
    entries: list[TokenLogprobs | None] = []
    for start in range(0, len(indices), _POSITIONS_AT_A_TIME):
        some = slice(start, start + _POSITIONS_AT_A_TIME)
        logits = to_logits(hidden.index_select(0, torch.tensor(indices[some], device=hidden.device)))
        entries += _score_finite(logits, targets[some], counts[some])
    by_row: dict[int, list[TokenLogprobs] | None] = {}
    taken = 0
    for index, row in enumerate(rows):
        own = entries[taken : taken + len(row.prompt_targets)]
        taken += len(own)
        if own:
            scored = [entry for entry in own if entry is not None]
            by_row[index] = scored if len(scored) == len(own) else None
    return by_row


def _score_finite(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs | None]:
    is_finite = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
    # The entries of other rows mean nothing, but a NaN would disturb the order of the best tokens.
    entries = score_tokens(torch.where(is_finite[:, None], logits, 0.0), token_ids, counts)
    return [entry if good else None for entry, good in zip(entries, is_finite.tolist(), strict=True)]

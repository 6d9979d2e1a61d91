"""Log-probabilities that requests ask to see."""

from collections.abc import Sequence

import torch

from radixserve.core.batch import SampleSlot
from radixserve.protocol import TokenLogprobs
from radixserve.sampling.top_tokens import top_tokens


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], slots: Sequence[SampleSlot]
) -> list[TokenLogprobs | None]:
    """Return log-probabilities of the drawn tokens and of the best ones, for the slots that ask for them.

    logits: [num_slots, vocab], as the model gave them: bias, penalties, suppression, temperature and truncation do not
    show. token_ids: the drawn tokens.
    """
    results: list[TokenLogprobs | None] = [None] * len(slots)
    wanted = [(row, slot.params.logprobs) for row, slot in enumerate(slots) if slot.params.logprobs is not None]
    if not wanted:
        return results
    asked = logits.index_select(0, torch.tensor([row for row, _ in wanted], device=logits.device))
    entries = score_tokens(asked, [token_ids[row] for row, _ in wanted], [count for _, count in wanted])
    for (row, _), entry in zip(wanted, entries, strict=True):
        results[row] = entry
    return results


def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probability of token_ids[i] in row i, and counts[i] alternatives.

    logits: [N, vocab], N at least one, finite. Alternatives are sorted best first, equal ones by id, and may hold the
    token itself.
    """
    # float64: a difference of two large numbers is what is reported.
    log_total = logits.double().logsumexp(dim=-1, keepdim=True)  # [N, 1]
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]  # [N, 1]
    values = logits.gather(1, tokens)
    is_before = torch.arange(logits.shape[1], device=logits.device) < tokens
    ranks = 1 + ((logits > values) | ((logits == values) & is_before)).sum(dim=-1)
    top: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    most = min(max(counts), logits.shape[1])
    if most > 0:
        best, ids = top_tokens(logits, most)
        pairs = zip(ids.tolist(), (best - log_total).tolist(), strict=True)
        top = [list(zip(*pair, strict=True)) for pair in pairs]
    logprobs = (values - log_total)[:, 0].tolist()
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, top=alternatives[:count], rank=rank)
        for token_id, logprob, alternatives, count, rank in zip(
            token_ids, logprobs, top, counts, ranks.tolist(), strict=True
        )
    ]

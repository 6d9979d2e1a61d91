"""The most likely tokens, in an order that ties cannot disturb."""

import torch


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest entries of each row, and their ids, by (logit descending, id ascending).

    logits: [N, vocab] without NaN. k: 1 to vocab. Both results are [N, k]; for any smaller k they are a prefix of
    these. torch.topk alone promises neither which of several equal entries it takes nor their order.
    """
    if k == logits.shape[1]:
        every = logits.sort(dim=-1, descending=True, stable=True)
        return every.values, every.indices
    kth = logits.topk(k, dim=-1).values[:, -1:]  # [N, 1]
    is_taken = logits >= kth
    num_surplus = is_taken.sum(dim=-1, keepdim=True) - k
    if bool((num_surplus > 0).any()):
        is_tied = logits == kth
        num_wanted = is_tied.sum(dim=-1, keepdim=True) - num_surplus
        is_taken &= ~is_tied | (is_tied.cumsum(dim=-1) <= num_wanted)
    # Each row has k entries left; nonzero lists them by row, then by id.
    ids = is_taken.nonzero()[:, 1].view(-1, k)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)

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
    show. token_ids: the drawn tokens. Alternatives are sorted best first, equal ones by id, and may hold the token.
    """
    results: list[TokenLogprobs | None] = [None] * len(slots)
    wanted = [(row, slot.params.logprobs) for row, slot in enumerate(slots) if slot.params.logprobs is not None]
    if not wanted:
        return results
    rows = torch.tensor([row for row, _ in wanted], device=logits.device)
    asked = logits.index_select(0, rows)
    # float64: a difference of two large numbers is what is reported.
    log_total = asked.double().logsumexp(dim=-1, keepdim=True)  # [N, 1]
    drawn = torch.tensor([[token_ids[row]] for row, _ in wanted], device=logits.device)
    drawn_logprobs = (asked.gather(1, drawn) - log_total)[:, 0].tolist()
    top: list[list[tuple[int, float]]] = [[] for _ in wanted]
    most = min(max(count for _, count in wanted), logits.shape[1])
    if most > 0:
        values, ids = top_tokens(asked, most)
        pairs = zip(ids.tolist(), (values - log_total).tolist(), strict=True)
        top = [list(zip(*pair, strict=True)) for pair in pairs]
    for (row, count), logprob, best in zip(wanted, drawn_logprobs, top, strict=True):
        results[row] = TokenLogprobs(token_id=token_ids[row], logprob=logprob, top=best[:count])
    return results

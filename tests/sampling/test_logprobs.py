from typing import Any

import pytest
import torch

from radixserve.sampling.sampler import sample
from radixserve.sampling.top_tokens import top_tokens
from tests.sampling.slots import slot


def test_logprobs_are_those_of_the_model_whatever_the_request_changes() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 5
    expected = logits.log_softmax(dim=-1)
    settings: list[dict[str, Any]] = [
        {"temperature": 0, "logit_bias": {7: 100.0}},
        {"temperature": 0.2, "top_k": 1, "suppressed": [int(logits[1].argmax())]},
        {"temperature": 0, "repetition_penalty": 9.0, "prompt": list(range(50))},
    ]
    token_ids, logprobs = sample(logits, [slot(logprobs=3, **setting) for setting in settings])
    assert token_ids[0] == 7
    for row, entry in enumerate(logprobs):
        assert entry is not None
        assert entry.token_id == token_ids[row]
        assert entry.logprob == pytest.approx(expected[row, token_ids[row]].item(), abs=1e-5)
        best = expected[row].topk(3)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_slot_gets_as_many_alternatives_as_it_asked_for() -> None:
    counts: list[int | None] = [None, 0, 1, 5, None, 20]
    _, logprobs = sample(torch.randn(6, 9), [slot(logprobs=count) for count in counts])
    assert [None if entry is None else len(entry.top) for entry in logprobs] == [None, 0, 1, 5, None, 9]


def test_equal_alternatives_are_sorted_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    _, (entry,) = sample(logits, [slot(temperature=0, logprobs=4)])
    assert entry is not None
    assert [token_id for token_id, _ in entry.top] == [1, 3, 0, 2]


def test_top_tokens_are_a_stable_sort_cut_short() -> None:
    logits = (torch.randn(20, 300, generator=torch.Generator().manual_seed(3)) * 2).round()
    logits[3] = 0.0
    logits[4, 5:] = -torch.inf
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    for k in (1, 2, 7, 100, 299, 300):
        ours = top_tokens(logits, k)
        assert torch.equal(ours[0], values[:, :k])
        assert torch.equal(ours[1], order[:, :k])

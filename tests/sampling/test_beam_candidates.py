"""The best next tokens of beams, beside draws of other requests."""

from dataclasses import replace

import pytest
import torch

from radixserve.sampling.beam_candidates import beam_candidates
from tests.sampling.slots import slot

LOGITS = torch.tensor([[2.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 1.0, 4.0]])


def test_only_slots_that_ask_get_candidates_and_each_as_many_as_it_asks_for() -> None:
    slots = [replace(slot(), num_candidates=2), slot(), replace(slot(), num_candidates=3)]
    first, second, third = beam_candidates(LOGITS, slots)
    assert [token_id for token_id, _ in first] == [2, 0]
    assert second is None
    assert [token_id for token_id, _ in third] == [0, 3, 1]
    expected = LOGITS.log_softmax(dim=-1)
    assert [logprob for _, logprob in third] == pytest.approx(expected[2, [0, 3, 1]].tolist())


def test_more_than_the_vocabulary_gives_all_of_it_and_suppressed_tokens_are_left_out() -> None:
    (best,) = beam_candidates(LOGITS[:1], [replace(slot(suppressed=(2,)), num_candidates=9)])
    assert [token_id for token_id, _ in best] == [0, 1, 3]


def test_processors_change_log_probabilities_and_nothing_is_normalised_again() -> None:
    settings = slot(prompt=(2,), logit_bias={1: 0.5}, repetition_penalty=2.0)
    before = LOGITS.clone()
    (best,) = beam_candidates(LOGITS[:1], [replace(settings, num_candidates=4)])
    assert torch.equal(before, LOGITS)
    logprobs = LOGITS[0].log_softmax(dim=-1).tolist()
    assert dict(best) == pytest.approx(
        {0: logprobs[0], 1: logprobs[1] + 0.5, 2: logprobs[2] * 2, 3: logprobs[3]}, abs=1e-6
    )


def test_a_beam_gets_the_same_candidates_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 500, generator=generator)
    slots = [replace(slot(), num_candidates=8) for _ in range(6)]
    together = beam_candidates(logits, slots)
    assert together == [beam_candidates(logits[row : row + 1], slots[:1])[0] for row in range(6)]

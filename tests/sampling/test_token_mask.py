import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from radixserve.core.batch import SampleSlot
from radixserve.sampling.processors import apply_processors
from radixserve.sampling.sampler import sample
from tests.sampling.slots import slot

NEVER = -torch.inf


def bits(allowed: Sequence[int], num_bits: int) -> bytes:
    """Return a bit for each id, in whole bytes."""
    flags = np.zeros(num_bits, dtype=np.uint8)
    flags[list(allowed)] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def constrained(allowed: Sequence[int], num_bits: int = 16, **settings: Any) -> SampleSlot:
    return dataclasses.replace(slot(**settings), allowed_tokens=bits(allowed, num_bits))


def masked(logits: list[float], one: SampleSlot) -> list[float]:
    result: list[float] = apply_processors(torch.tensor([logits]), [one])[0].tolist()
    return result


def test_only_allowed_tokens_keep_their_logits() -> None:
    assert masked([1.0, 2.0, 3.0], constrained([0, 2])) == [1.0, NEVER, 3.0]


def test_the_mask_may_be_longer_or_shorter_than_the_vocabulary() -> None:
    assert masked([1.0, 2.0, 3.0], constrained([1, 5, 12])) == [NEVER, 2.0, NEVER]
    assert masked([1.0] * 10, constrained([7], num_bits=8)) == [NEVER] * 7 + [1.0] + [NEVER] * 2


def test_rows_without_a_constraint_are_left_alone() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    slots = [slot(), constrained([0]), slot(suppressed=[0])]
    assert apply_processors(logits, slots).tolist() == [[1.0, 2.0], [3.0, NEVER], [NEVER, 6.0]]
    assert logits[1, 1] == 4.0


def test_a_bias_cannot_bring_back_what_is_not_allowed() -> None:
    one = constrained([0], logit_bias={1: 100.0}, temperature=0)
    assert masked([1.0, 2.0], one) == [1.0, NEVER]
    assert sample(torch.tensor([[1.0, 2.0]]), [one])[0] == [0]


def test_suppressed_tokens_go_unless_nothing_else_is_allowed() -> None:
    assert masked([1.0, 2.0, 3.0], constrained([0, 2], suppressed=[2])) == [1.0, NEVER, NEVER]
    assert masked([1.0, 2.0, 3.0], constrained([2], suppressed=[2, 9, -1])) == [NEVER, NEVER, 3.0]


def test_draws_stay_inside_the_mask_whatever_is_truncated() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 500, generator=generator) * 3
    allowed = [3, 77, 450]
    for settings in ({}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 0.0}):
        slots = [constrained(allowed, 512, choice_index=index, **settings) for index in range(300)]
        assert set(sample(logits, slots)[0]) <= set(allowed)


def test_logprobs_are_those_of_the_model_before_the_mask() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    _, [reported] = sample(logits, [constrained([0], temperature=0, logprobs=1)])
    assert reported is not None
    torch.testing.assert_close(reported.logprob, logits.log_softmax(-1)[0, 0].item())
    assert reported.top[0][0] == 2

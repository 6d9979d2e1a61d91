from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from radixserve.sampling.processors import apply_processors
from tests.sampling.slots import draw, draw_many, slot


def processed(logits: list[float], **settings: Any) -> list[float]:
    result: list[float] = apply_processors(torch.tensor([logits]), [slot(**settings)])[0].tolist()
    return result


def test_without_processors_the_logits_pass_uncopied() -> None:
    logits = torch.zeros(2, 8)
    assert apply_processors(logits, [slot(temperature=0), slot(top_p=0.5, logprobs=3)]) is logits


def test_a_bias_is_added_and_ids_outside_the_vocabulary_are_passed_over() -> None:
    bias = {0: 1.5, 2: -100.0, 3: 100.0, -1: 7.0, 2**40: 7.0}
    assert processed([1.0, 2.0, 3.0], logit_bias=bias) == [2.5, 2.0, -97.0]
    assert processed([1.0, 2.0], logit_bias={7: 1.0}) == [1.0, 2.0]


def test_presence_and_frequency_count_the_output_alone() -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    logits = [1.0, 1.0, 1.0, 1.0]
    assert processed(logits, prompt=[0, 0, 1], output=[1, 2, 2, 2], **penalties) == [1.0, 0.25, -0.25, 1.0]
    assert processed(logits, prompt=[0, 1], output=[], **penalties) == logits
    assert processed(logits, output=[3, 3], presence_penalty=-1.0) == [1.0, 1.0, 1.0, 2.0]
    assert processed(logits, output=[3, 3], frequency_penalty=-1.0) == [1.0, 1.0, 1.0, 3.0]


def test_repetition_counts_prompt_and_output_once_as_in_transformers() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0)) * 4
    prompt, output = [3, 5, 5, 9], [9, 11, 3]
    for penalty in (0.5, 1.3, 2.0):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
        ours = apply_processors(logits, [slot(prompt=prompt, output=output, repetition_penalty=penalty)])
        torch.testing.assert_close(ours, expected)
        assert not torch.equal(ours, logits)


def test_bias_comes_before_repetition_and_repetition_before_the_other_penalties() -> None:
    settings: dict[str, Any] = {"logit_bias": {0: 3.0}, "repetition_penalty": 2.0, "presence_penalty": 1.0}
    # (-1 + 3) / 2 - 1: the bias turned the sign that repetition looks at.
    assert processed([-1.0, 5.0], prompt=[1], output=[0], **settings) == [0.0, 2.5]


def test_suppression_comes_last() -> None:
    assert processed([1.0, 2.0], logit_bias={1: 100.0}, suppressed=[1, 9, -1]) == [1.0, -torch.inf]


def test_suppressing_the_whole_vocabulary_suppresses_nothing() -> None:
    assert processed([1.0, 2.0, 0.5], suppressed=[2, 1, 0, 1]) == [1.0, 2.0, 0.5]
    assert draw([1.0, 2.0, 0.5], suppressed=[0, 1, 2], temperature=0) == 1
    assert set(draw_many([1.0, 2.0, 0.5], 200, suppressed=[0, 1, 2])) == {0, 1, 2}


@pytest.mark.parametrize("penalty", [5e-324, 1e-60, 1e-30, 10.0])
def test_penalties_stay_finite_on_huge_logits_and_extreme_factors(penalty: float) -> None:
    result = processed([3e38, -3e38, 0.0, 1.0], prompt=[0, 1, 2, 3], repetition_penalty=penalty)
    assert torch.tensor(result).isfinite().all()
    assert result[1] <= result[2] == 0.0 < result[3] <= result[0]


def test_a_row_of_the_batch_is_changed_by_its_own_settings_alone() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"logit_bias": {1: 2.0}},
        {"presence_penalty": 1.0, "output": [2]},
        {"suppressed": [0]},
        {"repetition_penalty": 1.5, "prompt": [1, 3], "output": [0], "frequency_penalty": 0.3, "logit_bias": {0: -1.0}},
        {"presence_penalty": 1.0},
    ]
    logits = torch.randn(len(settings), 6, generator=torch.Generator().manual_seed(1))
    together = apply_processors(logits, [slot(**setting) for setting in settings])
    for row, setting in enumerate(settings):
        assert together[row].tolist() == processed(logits[row].tolist(), **setting)


def test_sc_3_penalties_do_not_depend_on_where_a_sequence_was_interrupted() -> None:
    """The slot of a resumed sequence is the same: prompt, output and where one ends."""
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(2)).repeat(2, 1)
    settings: dict[str, Any] = {"prompt": [1, 2], "output": [3, 3, 4], "frequency_penalty": 1.5}
    result = apply_processors(logits, [slot(**settings), slot(**settings)])
    assert torch.equal(result[0], result[1])
    assert not torch.equal(result[0], apply_processors(logits, [slot(**settings | {"output": [3, 3]})] * 2)[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_api_18_a_bias_of_100_forbids_or_forces_a_token(temperature: float) -> None:
    logits = [4.0, 1.0, 0.0, -1.0]
    assert 0 not in draw_many(logits, 200, temperature=temperature, logit_bias={0: -100.0})
    assert set(draw_many(logits, 200, temperature=temperature, logit_bias={3: 100.0})) == {3}
    both = {"temperature": temperature, "logit_bias": {3: 100.0}, "frequency_penalty": 2.0, "output": [3] * 20}
    assert set(draw_many(logits, 200, **both)) == {3}

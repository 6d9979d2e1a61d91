"""Sampling settings are checked when they are made, whoever makes them."""

from typing import Any

import pytest

from radixserve import SamplingParams
from radixserve.beam_search_params import BeamSearchParams
from radixserve.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", None),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("stop", "abc"),
        ("stop", 5),
        ("stop", [1]),
        ("stop_token_ids", ["1"]),
        ("logit_bias", {"1": 5}),
        ("logit_bias", [1]),
        ("seed", 1.0),
        ("ignore_eos", 1),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_lists_and_whole_numbers_are_taken_where_they_mean_the_same() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], temperature=1, logit_bias={5: 1})
    assert params == SamplingParams(stop=("a",), stop_token_ids=(3,), temperature=1.0, logit_bias={5: 1.0})


@pytest.mark.parametrize("word", ["\n", "  "])
def test_a_bad_word_of_white_space_is_refused_as_such(word: str) -> None:
    with pytest.raises(InvalidRequest, match="white space") as caught:
        SamplingParams(bad_words=(word,))
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize("value", [-1, 21])
def test_prompt_logprobs_have_a_range(value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(prompt_logprobs=value)
    assert caught.value.param == "prompt_logprobs"


def test_no_tokens_at_all_may_be_asked_for_but_not_of_a_beam_search() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 0
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(beam_width=2, max_tokens=0)
    assert caught.value.param == "max_tokens"

"""Sampling settings are checked when they are made, whoever makes them."""

from typing import Any

import pytest

from radixserve import SamplingParams
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

"""Settings of beam searches are checked when they are made."""

from typing import Any

import pytest

from radixserve import BeamSearchParams
from radixserve.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", -1),
        ("beam_width", 2.5),
        ("beam_width", "x"),
        ("beam_width", 129),
        ("n", 4),
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", 5),
        ("length_penalty", float("nan")),
        ("length_penalty", 101.0),
        ("early_stopping", "always"),
        ("repetition_penalty", 0.0),
        ("stop", ("",)),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_bs_5_a_setting_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        BeamSearchParams(**{"beam_width": 3, "max_tokens": 4, field: value})
    assert error.value.param == field


def test_all_beams_are_returned_unless_fewer_are_asked_for() -> None:
    assert BeamSearchParams(beam_width=3).num_returned == 3
    assert BeamSearchParams(beam_width=3, n=2).num_returned == 2

"""Whether blocks are read or computed, and how long a read is waited for."""

import pytest

from radixserve.core.tiers.choice import (
    MIN_PATIENCE,
    PATIENCE,
    UNMEASURED_PATIENCE,
    Rates,
    is_reading_faster,
    patience,
)


@pytest.mark.parametrize("rates", [Rates(None, None), Rates(None, 1e-9), Rates(1e9, None)])
def test_what_is_not_measured_yet_is_read(rates: Rates) -> None:
    assert is_reading_faster(rates, 1, 0)


def test_the_faster_way_is_taken() -> None:
    assert is_reading_faster(Rates(read=0.9, compute=1.0), 5, 0)
    assert not is_reading_faster(Rates(read=1.1, compute=1.0), 5, 0)


def test_what_is_read_before_counts_against_reading() -> None:
    rates = Rates(read=0.1, compute=1.0)
    assert is_reading_faster(rates, 10, 89)
    assert not is_reading_faster(rates, 10, 91)


def test_a_read_may_take_twice_as_long_as_computing() -> None:
    assert patience(Rates(read=None, compute=0.5), 10) == PATIENCE * 5.0


def test_patience_has_a_least_and_a_first_value() -> None:
    assert patience(Rates(read=None, compute=1e-9), 10) == MIN_PATIENCE
    assert patience(Rates(read=1.0, compute=None), 10) == UNMEASURED_PATIENCE

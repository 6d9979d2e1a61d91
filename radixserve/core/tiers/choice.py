"""Whether to read blocks back or to compute them again, by what both have taken of late."""

from typing import NamedTuple

# For so long a first read is waited for, when nothing says yet how long computing would take.
UNMEASURED_PATIENCE = 5.0
# The engine looks for what was read once a step, and that often when it is idle, so less would be noise.
MIN_PATIENCE = 0.05
# Computing in so many times the expected time is what a read that hangs costs at most.
PATIENCE = 2.0


class Rates(NamedTuple):
    """Seconds that reading a block, and computing one, take; None if it was not measured yet."""

    read: float | None
    compute: float | None


def is_reading_faster(rates: Rates, num_blocks: int, num_blocks_before: int) -> bool:
    """Whether blocks are sooner read than computed, where so many others are read before them.

    True while one of the rates is unknown: reading is how the first becomes known, and costs little while the second
    is.
    """
    if rates.read is None or rates.compute is None:
        return True
    return (num_blocks_before + num_blocks) * rates.read < num_blocks * rates.compute


def patience(rates: Rates, num_blocks: int) -> float:
    """Return for how many seconds to wait for blocks to be read."""
    if rates.compute is None:
        return UNMEASURED_PATIENCE
    return max(MIN_PATIENCE, PATIENCE * num_blocks * rates.compute)

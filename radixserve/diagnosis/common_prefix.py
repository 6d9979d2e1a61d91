"""How far two sequences are the same."""

from collections.abc import Sequence


def num_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))

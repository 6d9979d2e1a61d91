"""Gaps between two uses of a block, counted in requests: buckets to learn in, and classes to tell uses apart."""

from itertools import pairwise
from math import log2

import numpy as np

from radixserve.core.eviction.answer import Answer

# Gaps up to 2 ** 24 requests, two buckets an octave, and one for none at all.
NUM_BUCKETS = 51
# The gap at which each bucket begins.
BUCKET_STARTS = np.array([0.0, *(2.0 ** ((bucket - 1) / 2 - 1) for bucket in range(1, NUM_BUCKETS))])

NUM_KINDS = 3
NUM_LENGTHS = 5
NUM_GAP_CLASSES = 12
# A kind is 0 for an answer of which nothing is known, as for one that did not end.
_CALLS_TOOL, _OTHER = 1, 2
_LENGTH_LIMITS = (64, 192, 512, 1500)


def bucket_of(gap: int) -> int:
    """Return the bucket of a gap."""
    return min(int(2 * (log2(gap) + 1)) + 1, NUM_BUCKETS - 1) if gap else 0


def gap_class_of(gap: int) -> int:
    """Return the class of a gap, two octaves wide. 0 stands for no gap: a first use."""
    return max(1, min(NUM_GAP_CLASSES - 1, 1 + int((log2(max(gap, 1)) - 2) // 2)))


def answer_class_of(answer: Answer) -> int:
    """Return the class of an answer. 0 stands for one that is not known."""
    length = sum(answer.num_tokens >= limit for limit in _LENGTH_LIMITS)
    return (_CALLS_TOOL if answer.calls_tool else _OTHER) * NUM_LENGTHS + length


def bucket_borders() -> list[tuple[int, int]]:
    """Return each gap that is the least of its bucket, and the bucket."""
    gaps = [0]
    for start in BUCKET_STARTS[1:]:
        gap = int(np.ceil(start))
        if bucket_of(gap) != bucket_of(gaps[-1]):
            gaps.append(gap)
    assert all(bucket_of(before) < bucket_of(after) for before, after in pairwise(gaps))
    return [(gap, bucket_of(gap)) for gap in gaps[1:]]

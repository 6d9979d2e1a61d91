"""Gaps between two uses of a block, counted in requests: buckets to learn in, and classes to tell uses apart."""

from itertools import pairwise
from math import log2

import numpy as np

from radixserve.core.eviction.answer import Answer

# Gaps up to 2 ** 24 requests, two buckets an octave, and one for none at all.
NUM_BUCKETS = 51
# The gap at which each bucket begins.
BUCKET_STARTS = np.array([0.0, *(2.0 ** ((bucket - 1) / 2 - 1) for bucket in range(1, NUM_BUCKETS))])

NUM_GAP_CLASSES = 12
_LENGTH_LIMITS = (64, 192, 512, 1500)
# The class of an answer that has not ended, and of one of which it will never be known how.
UNKNOWN_ANSWER = 0


def bucket_of(gap: int) -> int:
    """Return the bucket of a gap."""
    return min(int(2 * (log2(gap) + 1)) + 1, NUM_BUCKETS - 1) if gap else 0


def gap_class_of(gap: int) -> int:
    """Return the class of a gap, two octaves wide. 0 stands for no gap: a first use."""
    return max(1, min(NUM_GAP_CLASSES - 1, 1 + int((log2(max(gap, 1)) - 2) // 2)))


def answer_class_of(answer: Answer) -> int:
    """Return the class of an answer that has ended."""
    kind = {None: 0, True: 1, False: 2}[answer.calls_tool]
    length = sum(answer.num_tokens >= limit for limit in _LENGTH_LIMITS)
    return 1 + kind * (len(_LENGTH_LIMITS) + 1) + length


def kind_of(answer_class: int) -> int:
    """Return what the classes of answers that call a tool have in common, those that do not, and each other kind."""
    return (answer_class - 1) // (len(_LENGTH_LIMITS) + 1)


def bucket_borders() -> list[tuple[int, int]]:
    """Return each gap that is the least of its bucket, and the bucket."""
    gaps = [0]
    for start in BUCKET_STARTS[1:]:
        gap = int(np.ceil(start))
        if bucket_of(gap) != bucket_of(gaps[-1]):
            gaps.append(gap)
    assert all(bucket_of(before) < bucket_of(after) for before, after in pairwise(gaps))
    return [(gap, bucket_of(gap)) for gap in gaps[1:]]

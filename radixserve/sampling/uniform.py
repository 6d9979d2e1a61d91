"""Uniform numbers, each a pure function of the draw that it is for."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], choice_indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1), a multiple of 2**-53, for each (seed, choice index, position).

    Counter-based: there is no generator whose state a neighbour in the batch, a cache hit or a preemption could move.
    Any integers are taken, modulo 2**64. Source: the output function of SplitMix64 (Steele, Lea and Flood 2014, with
    Stafford's constants), chained over the three words.
    """
    state = np.zeros(len(seeds), dtype=np.uint64)
    for words in (seeds, choice_indices, positions):
        state = _mix((state ^ np.array([word & _WORD for word in words], dtype=np.uint64)) + _GAMMA)
    # Once more: neighbouring positions differ in their low bits only, and one round is a little weak there.
    bits = _mix(state + _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

"""Packed arrays of 32-bit numbers, as numpy reads them: block ids, and what is kept of each block."""

from array import array

import numpy as np
import numpy.typing as npt


def view_of(packed: "array[int]") -> npt.NDArray[np.int32]:
    """Return the numbers in place. While the view lives, the array can change but not grow or shrink."""
    return np.frombuffer(packed, np.int32)


def indices_of(block_ids: "array[int]") -> npt.NDArray[np.intp]:
    """Return block ids to index with: in the machine's own width, as numpy would make them so at each use anew."""
    return view_of(block_ids).astype(np.intp)

"""What is remembered of evicted blocks: enough to see that they would have been used again."""

from array import array

import numpy as np
import numpy.typing as npt

from radixserve.core.eviction.use import Segment

Fingerprints = npt.NDArray[np.uint32]


class Fingerprinter:
    """Tells blocks apart by their tokens alone, in 4 bytes: enough for statistics, and for nothing else."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # Odd, so that no token is lost; any will do.
        self._factors = np.random.default_rng(0).integers(2**64, size=block_size, dtype=np.uint64) | np.uint64(1)

    def of(self, token_ids: "array[int]") -> Fingerprints:
        """Return the fingerprints of whole blocks. [num_blocks]"""
        tokens = np.frombuffer(token_ids, np.int32).reshape(-1, self._block_size).astype(np.uint64)
        fingerprints: Fingerprints = (tokens @ self._factors >> np.uint64(32)).astype(np.uint32)
        return fingerprints


class Ghosts:
    """Segments of which every block was evicted, each found by what it followed and by its first block."""

    def __init__(self) -> None:
        self._segments: dict[tuple[bytes | None, int], Segment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, segment: Segment) -> Segment | None:
        """Remember a segment, and return the one in whose place it is."""
        before = self._segments.pop(_key(segment), None)
        self._segments[_key(segment)] = segment
        return before

    def take(self, above: bytes, first: int) -> Segment | None:
        """Return the segment behind a block of that digest whose first block has that fingerprint, and forget it."""
        return self._segments.pop((above, first), None)

    def take_oldest(self) -> Segment:
        """Return the segment that was remembered for longest, and forget it. There must be one."""
        return self._segments.pop(next(iter(self._segments)))

    def discard(self, segment: Segment) -> None:
        """Forget a segment, if it is here."""
        if segment.gone and self._segments.get(_key(segment)) is segment:
            del self._segments[_key(segment)]


def num_common(gone: "array[int]", fingerprints: Fingerprints) -> int:
    """Return how many blocks, the last ones of gone in reverse, are those with fingerprints."""
    n = min(len(gone), len(fingerprints))
    differs = np.frombuffer(gone, np.uint32)[::-1][:n] != fingerprints[:n]
    return int(differs.argmax()) if differs.any() else n


def _key(segment: Segment) -> tuple[bytes | None, int]:
    return segment.above, segment.gone[-1]

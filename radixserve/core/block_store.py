"""Where blocks of K/V go that the pool has no room for, and come back from."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from radixserve.protocol import TierStats

# A name is the mark of its owner, and a SHA-256.
OWNER_BYTES = 8
NAME_BYTES = OWNER_BYTES + 32

BlockBytes = npt.NDArray[np.uint8]  # [num_blocks, block_bytes], contiguous


class ReadDone(NamedTuple):
    """What has become of a read.

    blocks: [k, block_bytes], the first k of the blocks asked for: those before the first that is not there, or is not
    what was written. The receiver owns it.
    """

    ticket: int
    blocks: BlockBytes


class BlockStore(Protocol):
    """Holds blocks outside of the pool, by their names; see core/block_keys.py for what a name is and stands for.

    Whatever takes time happens elsewhere: no method but close waits for a disk. To be called by one thread. A store may
    forget any block at any time, and gives back what was written under a name or nothing.
    """

    @property
    def block_bytes(self) -> int:
        """Size of each block."""

    @property
    def num_pending_writes(self) -> int:
        """Number of blocks that are queued or being written."""

    @property
    def num_pending_reads(self) -> int:
        """Number of blocks that are queued, being read, or not yet told of by completed()."""

    @property
    def seconds_per_block(self) -> float | None:
        """How long reading a block takes, as measured of late; None before the first one."""

    def contains(self, name: bytes) -> bool:
        """Return whether a block would be found, as far as is known without looking."""

    def has_room(self, num_blocks: int) -> bool:
        """Return whether write would take so many blocks now; never does a store that is off."""

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        """Queue blocks, which now belong to the store. The last of them counts as the one that was used last.

        What is there already is not written again. What the queue has no room for is dropped and counted, the last
        ones first. Raises ValueError if blocks is not [len(names), block_bytes].
        """

    def read(self, ticket: int, names: Sequence[bytes]) -> None:
        """Queue a read of blocks in the order of a prompt. completed() tells of each ticket once.

        The first of them counts as the one that was used last, as the ones behind it are found only through it.
        """

    def completed(self) -> list[ReadDone]:
        """Return the reads that have been done since the last call."""

    def forget(self, owner: bytes) -> None:
        """Give back no block any more that is there or queued and whose name begins with owner; b"" for all."""

    def stats(self) -> TierStats:
        """Return counters and gauges."""

    def stats_of_stores(self) -> list[TierStats]:
        """Return those of each of the stores that this one is made of, or its own if it is of none."""

    def close(self, timeout: float) -> None:
        """End, after the queued writes or timeout seconds. Reads that are queued are not answered any more."""


def check_blocks(names: Sequence[bytes], blocks: BlockBytes, block_bytes: int) -> None:
    """Raise ValueError unless blocks are as many as their names, and of block_bytes each."""
    if blocks.shape != (len(names), block_bytes) or blocks.dtype != np.uint8:
        raise ValueError(f"{len(names)} blocks of {block_bytes} bytes expected, not {blocks.dtype} {blocks.shape}")

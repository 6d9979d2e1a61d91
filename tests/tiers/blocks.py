"""Blocks whose content follows from their number, so that each can be told from every other."""

import hashlib
import time
from collections.abc import Sequence

import numpy as np

from radixserve.core.block_store import OWNER_BYTES, BlockBytes, BlockStore

BLOCK_BYTES = 64


def name_of(number: int) -> bytes:
    """Return the name of a block whose owner is number modulo 4."""
    return bytes([number % 4]).ljust(OWNER_BYTES) + hashlib.sha256(number.to_bytes(8, "little")).digest()


def names_of(numbers: Sequence[int]) -> list[bytes]:
    return [name_of(number) for number in numbers]


def blocks_of(numbers: Sequence[int], block_bytes: int = BLOCK_BYTES) -> BlockBytes:
    blocks = np.empty((len(numbers), block_bytes), dtype=np.uint8)
    for row, number in enumerate(numbers):
        blocks[row] = np.random.default_rng(number).integers(0, 256, block_bytes, dtype=np.uint8)
    return blocks


def write(store: BlockStore, *numbers: int) -> None:
    store.write(names_of(numbers), blocks_of(numbers, store.block_bytes))


def read(store: BlockStore, *numbers: int) -> BlockBytes:
    """Read blocks and wait for them."""
    store.read(7, names_of(numbers))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for done in store.completed():
            assert done.ticket == 7
            return done.blocks
        time.sleep(0)  # let the store's threads run
    raise TimeoutError

"""What an owner wishes dropped is found no more, in no store and by no later server."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from radixserve.core.block_store import OWNER_BYTES, BlockStore
from radixserve.tiers.chain import Chain
from radixserve.tiers.disk_store import DiskStore
from radixserve.tiers.memory_store import MemoryStore
from tests.tiers.blocks import BLOCK_BYTES, blocks_of, name_of, read, write

BUILD = bytes(32)
NUM_SLOTS = 8
CAPACITY = 1 << 16


def disk(path: Path) -> DiskStore:
    return DiskStore(path / "cache", BLOCK_BYTES, CAPACITY, BUILD)


def memory(_: Path) -> MemoryStore:
    return MemoryStore(BLOCK_BYTES, NUM_SLOTS * BLOCK_BYTES)


def chain(path: Path) -> Chain:
    return Chain([memory(path), disk(path)])


def settle(store: BlockStore) -> None:
    if isinstance(store, DiskStore):
        assert store.wait_idle(30)


def owner(number: int) -> bytes:
    return name_of(number)[:OWNER_BYTES]


@pytest.mark.parametrize("make_store", [disk, memory, chain])
@pytest.mark.parametrize("settles", [True, False])
def test_the_blocks_of_one_owner_are_dropped(
    tmp_path: Path, make_store: Callable[[Path], BlockStore], settles: bool
) -> None:
    """Be they written or still queued."""
    store = make_store(tmp_path)
    write(store, *range(NUM_SLOTS))
    if settles:
        settle(store)
    store.forget(owner(1))
    assert [store.contains(name_of(number)) for number in range(4)] == [True, False, True, True]
    assert len(read(store, 1)) == len(read(store, 5)) == 0
    assert np.array_equal(read(store, 2, 6), blocks_of([2, 6]))
    write(store, 1)
    settle(store)
    assert np.array_equal(read(store, 1), blocks_of([1]))
    store.close(30)


@pytest.mark.parametrize("make_store", [disk, memory, chain])
def test_all_blocks_are_dropped_and_their_room_is_used_again(
    tmp_path: Path, make_store: Callable[[Path], BlockStore]
) -> None:
    store = make_store(tmp_path)
    for start in range(0, 3 * NUM_SLOTS, NUM_SLOTS):
        write(store, *range(start, start + NUM_SLOTS))
        settle(store)
        store.forget(b"")
        settle(store)
        assert store.stats().num_blocks == store.stats().used_bytes == 0
    write(store, *range(NUM_SLOTS))
    settle(store)
    assert np.array_equal(read(store, *range(NUM_SLOTS)), blocks_of(range(NUM_SLOTS)))
    store.close(30)


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_later_server_does_not_find_what_was_forgotten(tmp_path: Path, is_restored: bool) -> None:
    """Neither what this server wrote, nor what one before it had left, be it found yet or not."""
    store = disk(tmp_path)
    write(store, *range(NUM_SLOTS))
    if is_restored:
        store.close(30)
        store = disk(tmp_path)
    store.forget(owner(3))
    assert not store.contains(name_of(3))
    settle(store)
    assert not store.contains(name_of(3))
    store.close(30)
    later = disk(tmp_path)
    settle(later)
    assert [later.contains(name_of(number)) for number in range(NUM_SLOTS)] == [number % 4 != 3 for number in range(8)]
    later.close(30)

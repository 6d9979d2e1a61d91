"""A fast store before a slow one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from radixserve.tiers.chain import Chain
from radixserve.tiers.disk_store import DiskStore
from radixserve.tiers.memory_store import MemoryStore
from tests.tiers.blocks import BLOCK_BYTES, blocks_of, name_of, names_of, read, write


@pytest.fixture
def host() -> MemoryStore:
    return MemoryStore(BLOCK_BYTES, 2 * BLOCK_BYTES)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "cache", BLOCK_BYTES, 1 << 20, bytes(32))
    yield store
    store.close(30)


def test_what_the_fast_store_gives_up_is_read_from_the_slow_one(host: MemoryStore, disk: DiskStore) -> None:
    chain = Chain([host, disk])
    write(chain, *range(6))
    assert disk.wait_idle(30)
    assert [number for number in range(7) if host.contains(name_of(number))] == [4, 5]
    assert [number for number in range(7) if chain.contains(name_of(number))] == list(range(6))
    np.testing.assert_array_equal(read(chain, 0, 5, 1, 2, 4, 3), blocks_of([0, 5, 1, 2, 4, 3]))
    assert (host.stats().num_hit_blocks, disk.stats().num_hit_blocks) == (2, 4)


def test_a_read_ends_before_the_first_block_that_neither_has(host: MemoryStore, disk: DiskStore) -> None:
    chain = Chain([host, disk])
    write(chain, 0, 1, 2, 4)
    np.testing.assert_array_equal(read(chain, 0, 4, 3, 1), blocks_of([0, 4]))
    assert read(chain, 3, 0).shape == (0, BLOCK_BYTES)
    assert read(chain).shape == (0, BLOCK_BYTES)


def test_a_part_that_falls_short_ends_the_read() -> None:
    """What a store says to hold may be gone, or damaged, when it is read."""
    slow = MemoryStore(BLOCK_BYTES, 4 * BLOCK_BYTES)

    class Forgetful(MemoryStore):
        def contains(self, name: bytes) -> bool:
            return name in names_of([0, 1])

    fast = Forgetful(BLOCK_BYTES, 4 * BLOCK_BYTES)
    fast.write(names_of([0]), blocks_of([0]))
    slow.write(names_of([2, 3]), blocks_of([2, 3]))
    chain = Chain([fast, slow])
    np.testing.assert_array_equal(read(chain, 2, 0, 1, 3), blocks_of([2, 0]))
    assert chain.num_pending_reads == 0


def test_several_reads_are_told_apart(host: MemoryStore, disk: DiskStore) -> None:
    chain = Chain([host, disk])
    write(chain, *range(6))
    asked = {ticket: [ticket % 6, (ticket * 5 + 4) % 6, 6 - ticket % 6] for ticket in range(10, 30)}
    for ticket, numbers in asked.items():
        chain.read(ticket, names_of(numbers))
    assert chain.num_pending_reads > 0
    while asked:
        for done in chain.completed():
            numbers = asked.pop(done.ticket)
            expected = numbers if 6 not in numbers else numbers[: numbers.index(6)]
            np.testing.assert_array_equal(done.blocks, blocks_of(expected))
    assert chain.num_pending_reads == 0


def test_a_chain_goes_on_with_the_stores_that_are_on(host: MemoryStore, disk: DiskStore) -> None:
    chain = Chain([host, disk])
    assert chain.has_room(10)
    disk.close(30)
    assert chain.has_room(10)
    write(chain, 0)
    np.testing.assert_array_equal(read(chain, 0), blocks_of([0]))
    assert [tier.is_on for tier in chain.stats_of_stores()] == [True, False]
    chain.close(30)
    assert not chain.has_room(0)
    assert not chain.stats().is_on


def test_stats_add_up(host: MemoryStore, disk: DiskStore) -> None:
    chain = Chain([host, disk])
    assert chain.seconds_per_block is None
    write(chain, *range(6))
    assert disk.wait_idle(30)
    read(chain, 0, 5)
    stats = chain.stats()
    assert stats.name == "host+disk"
    assert (stats.num_blocks, stats.num_written_blocks, stats.num_hit_blocks) == (8, 12, 2)
    assert chain.seconds_per_block == max(host.seconds_per_block or 0, disk.seconds_per_block or 0)
    assert chain.num_pending_writes == 0


def test_stores_of_other_block_sizes_are_refused(host: MemoryStore) -> None:
    with pytest.raises(ValueError, match="one size"):
        Chain([host, MemoryStore(128, 128)])

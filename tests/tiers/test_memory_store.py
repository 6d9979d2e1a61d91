"""The store in the host's memory."""

import numpy as np
import pytest

from radixserve.errors import ConfigError
from radixserve.tiers.memory_store import MemoryStore
from tests.tiers.blocks import BLOCK_BYTES, blocks_of, name_of, names_of, read, write


def held(store: MemoryStore, *numbers: int) -> list[int]:
    return [number for number in numbers if store.contains(name_of(number))]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(BLOCK_BYTES, 3 * BLOCK_BYTES + 1)


def test_what_was_written_is_read_back(store: MemoryStore) -> None:
    write(store, 0, 1, 2)
    np.testing.assert_array_equal(read(store, 2, 0, 1), blocks_of([2, 0, 1]))


def test_a_read_ends_before_the_first_block_that_is_not_there(store: MemoryStore) -> None:
    write(store, 0, 2)
    np.testing.assert_array_equal(read(store, 0, 1, 2), blocks_of([0]))
    assert read(store, 1, 2).shape == (0, BLOCK_BYTES)


def test_blocks_given_out_do_not_change_with_the_store(store: MemoryStore) -> None:
    write(store, 0)
    blocks = read(store, 0)
    write(store, 1, 2, 3, 4)
    np.testing.assert_array_equal(blocks, blocks_of([0]))


def test_a_block_does_not_change_with_the_array_that_it_came_in(store: MemoryStore) -> None:
    blocks = blocks_of([0])
    store.write(names_of([0]), blocks)
    blocks[:] = 0
    np.testing.assert_array_equal(read(store, 0), blocks_of([0]))


def test_the_least_recently_used_block_gives_way(store: MemoryStore) -> None:
    write(store, 0, 1, 2)
    read(store, 0)
    write(store, 3)
    assert held(store, 0, 1, 2, 3) == [0, 2, 3]
    write(store, 2)
    write(store, 4)
    assert held(store, 0, 1, 2, 3, 4) == [2, 3, 4]


def test_of_a_prompts_blocks_the_deepest_gives_way_first(store: MemoryStore) -> None:
    write(store, 0, 1, 2)
    read(store, 0, 1, 2)
    write(store, 3)
    assert held(store, 0, 1, 2) == [0, 1]


def test_random_writes_and_reads_agree_with_a_plain_list() -> None:
    random = np.random.default_rng(0)
    store, recent = MemoryStore(BLOCK_BYTES, 5 * BLOCK_BYTES), list[int]()
    for _ in range(500):
        numbers = [int(number) for number in random.choice(12, size=random.integers(1, 6), replace=False)]
        if random.random() < 0.5:
            write(store, *numbers)
            for number in numbers:
                recent = [*(other for other in recent if other != number), number][-5:]
        else:
            k = next((k for k, number in enumerate(numbers) if number not in recent), len(numbers))
            np.testing.assert_array_equal(read(store, *numbers), blocks_of(numbers[:k]))
            recent = [*(other for other in recent if other not in numbers[:k]), *reversed(numbers[:k])]
        assert held(store, *range(12)) == sorted(recent)


def test_stats_count_blocks(store: MemoryStore) -> None:
    assert store.seconds_per_block is None
    write(store, 0, 1, 1, 2, 3)
    read(store, 2, 3, 0)
    stats = store.stats()
    assert (stats.name, stats.capacity_bytes, stats.used_bytes) == ("host", 3 * BLOCK_BYTES + 1, 3 * BLOCK_BYTES)
    assert (stats.num_blocks, stats.num_written_blocks, stats.num_hit_blocks) == (3, 4, 2)
    assert store.seconds_per_block is not None


def test_the_rate_is_that_of_the_blocks_read_of_late() -> None:
    times = iter([0.0, 2.0, *(10.0, 11.0) * 200])
    store = MemoryStore(BLOCK_BYTES, 3 * BLOCK_BYTES, clock=lambda: next(times))
    write(store, 0, 1)
    read(store, 0, 1)
    assert store.seconds_per_block == 1.0
    for _ in range(200):
        read(store, 0, 1)
    assert store.seconds_per_block == pytest.approx(0.5)


def test_blocks_of_a_wrong_size_are_refused(store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="2 blocks of 64 bytes"):
        store.write(names_of([0, 1]), blocks_of([0, 1], 63))
    with pytest.raises(ValueError, match="2 blocks of 64 bytes"):
        store.write(names_of([0, 1]), blocks_of([0]))


def test_a_store_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-host-memory"):
        MemoryStore(BLOCK_BYTES, BLOCK_BYTES - 1)


def test_a_closed_store_takes_and_gives_nothing(store: MemoryStore) -> None:
    write(store, 0)
    store.close(1.0)
    write(store, 1)
    assert held(store, 0, 1) == []
    assert not store.has_room(1)
    assert not store.stats().is_on
    assert store.stats().num_dropped_blocks == 1

"""The order in which blocks give way, where the threads of a store make it hard to reach."""

from radixserve.tiers.block_index import BlockIndex, Place
from radixserve.tiers.segment import Entry
from tests.tiers.blocks import name_of


def restored_index(num_blocks: int) -> BlockIndex:
    """Return an index that has restored blocks, the first one used longest ago, and used none itself."""
    index = BlockIndex()
    for number in range(num_blocks):
        index.restore(Place(0, number), Entry(name_of(number), bytes(16), number + 1))
    index.set_restored_order(iter([name_of(number) for number in range(num_blocks)]))
    return index


def test_a_restored_block_that_is_being_read_gives_way_after_all_others() -> None:
    index = restored_index(3)
    assert index.take(kept=Place(0, 0)) == Place(0, 1)
    assert index.take(kept=Place(0, 0)) == Place(0, 2)
    assert index.take(kept=Place(0, 0)) is None
    assert index.take(kept=None) == Place(0, 0)
    assert index.take(kept=None) is None
    assert len(index) == 0


def test_of_two_restored_blocks_of_one_name_the_later_one_stays() -> None:
    for order in ([0, 1], [1, 0]):
        index = BlockIndex()
        for slot in order:
            index.restore(Place(0, slot), Entry(name_of(7), bytes(16), slot + 1))
        found = index.find(name_of(7))
        assert found is not None
        assert found[0] == Place(0, 1)
        assert index.take(kept=None) == Place(0, 0)
        assert len(index) == 1


def test_a_clock_that_is_set_back_changes_no_order() -> None:
    index = restored_index(1)
    index.restore(Place(0, 1), Entry(name_of(1), bytes(16), 1 << 63))
    assert index.new_use() == (1 << 63) + 1

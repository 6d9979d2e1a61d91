"""Laws of the eviction queue, against a plain dictionary in order of insertion."""

import pickle
import random
from array import array

import pytest

from radixserve.core.eviction.lru import LeastRecentlyUsed


def alone(block_id: int, _: int) -> "array[int]":
    """Each block is a run of its own."""
    return array("i", [block_id])


def queue(num_blocks: int) -> LeastRecentlyUsed:
    return LeastRecentlyUsed(num_blocks, alone)


@pytest.mark.parametrize("num_blocks", [1, 10, 300])
@pytest.mark.parametrize("share_of_leavers", [0.3, 0.5, 0.7])
def test_the_oldest_is_the_one_that_came_first_of_those_still_here(num_blocks: int, share_of_leavers: float) -> None:
    rng = random.Random(num_blocks)
    unheld = queue(num_blocks)
    model: dict[int, None] = {}
    for _ in range(1500):
        some = rng.sample(range(num_blocks), rng.randint(1, num_blocks))
        if rng.random() < share_of_leavers:
            assert unheld.count(array("i", some)) == sum(block_id in model for block_id in some)
            if len(some) == 1:
                unheld.discard(some[0])
            else:
                unheld.discard_all(array("i", some))
            for block_id in some:
                model.pop(block_id, None)
        else:
            new = [block_id for block_id in some if block_id not in model]
            if len(new) == 1:
                unheld.add(new[0])
            else:
                unheld.add_all(array("i", new))
            model |= dict.fromkeys(new)
        assert len(unheld) == len(model)
        assert list(unheld) == list(model)
        assert all((block_id in unheld) == (block_id in model) for block_id in range(num_blocks))
        if model:
            assert unheld.first(rng.randint(1, 9)) == (next(iter(model)), 1)


def test_all_leave_in_the_order_in_which_they_came() -> None:
    unheld = queue(100)
    order = random.Random(0).sample(range(100), 100)
    unheld.add_all(array("i", order))
    left = []
    while unheld:
        left.append(unheld.first(1)[0])
        unheld.discard(left[-1])
    assert left == order


def test_dead_entries_stay_fewer_than_a_bound() -> None:
    unheld = queue(10)
    unheld.add(0)
    for _ in range(1000):
        unheld.add(1)
        unheld.discard(1)
    assert unheld.first(1) == (0, 1)
    assert len(pickle.dumps(unheld)) < 1000

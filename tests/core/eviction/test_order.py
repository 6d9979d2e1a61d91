"""Laws of both orders of eviction."""

import random
from typing import get_args

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.eviction.answer import Answer
from tests.core.driver import Driver, Prefix, make_sequence

EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)


def kept_of(eviction_policy: EvictionPolicy, share: float, num_at_once: int | None) -> tuple[set[Prefix], int]:
    """Fill a cache with forks that ended in any order and requests for parts of what was there; give up a share of it.

    Returns what is left, and how many blocks went.

    num_at_once: how many blocks go at a time; None for all.
    """
    rng = random.Random(0)
    driver = Driver(num_blocks=400, block_size=1, eviction_policy=eviction_policy)
    for _ in range(40):
        sequences = [driver.start([rng.choice([7, 8]), *rng.choices(range(3), k=rng.randint(1, 30))])]
        sequences.append(driver.fork(sequences[0], [rng.randrange(3), *range(100, 100 + rng.randint(1, 20))]))
        assert driver.step(sequences[1], sequences[1].num_uncomputed_tokens)
        rng.shuffle(sequences)
        for sequence in sequences:
            driver.cache.record_answer(sequence, Answer(rng.random() < 0.5, 10))
            driver.finish(sequence)
        path = rng.choice(driver.entries()).token_ids
        driver.finish(driver.start(path[: rng.randint(1, len(path))]))
    # The upper parts of some paths stay held, by others and by forks of who was the last to use them.
    for entry in rng.choices(driver.entries(), k=3):
        driver.start(entry.token_ids)
        parent = driver.start([rng.randrange(3) for _ in range(9)])
        driver.fork(parent)
        driver.generate(parent, range(200, 212))
        driver.finish(parent)
    stats = driver.cache.stats()
    num_evicted = int(share * stats.num_cached_blocks)
    unseen = make_sequence([-1] * (stats.num_free_blocks + num_evicted))
    assert driver.admit(unseen, stats.num_free_blocks)
    size = num_at_once or num_evicted
    for num_blocks in [size] * (num_evicted // size):
        unseen.num_computed_tokens = len(unseen.block_table)
        assert driver.extend(unseen, num_blocks)
    driver.cache.release(unseen)
    driver.running.remove(unseen)
    driver.check()
    return set(driver.findable().values()), num_evicted


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_the_same_blocks_go_whether_room_is_made_one_by_one_or_all_at_once(
    eviction_policy: EvictionPolicy, share: float
) -> None:
    kept, num_evicted = kept_of(eviction_policy, share, num_at_once=1)
    assert num_evicted > 10
    assert kept_of(eviction_policy, share, num_at_once=None) == (kept, num_evicted)

"""Beams as the cache sees them: sequences that fork, write and are released, over a shadow of the K/V."""

import random

import pytest

from radixserve.core.sequence import Sequence
from tests.core.driver import Driver

BLOCK_SIZE = 4
NUM_BLOCKS = 80
MAX_BEAMS = 8


def num_blocks_needed(beams: list[Sequence]) -> int:
    """Distinct prefixes of whole blocks, and distinct part-filled blocks, of what is computed."""
    computed = [tuple(beam.token_ids[: beam.num_computed_tokens]) for beam in beams]
    full = {tokens[:end] for tokens in computed for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}
    return len(full) + len({tokens for tokens in computed if len(tokens) % BLOCK_SIZE})


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_operations", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_forks_writes_and_releases_lose_no_block_and_share_all_they_can(num_operations: int) -> None:
    numbers = random.Random(0)
    driver = Driver(NUM_BLOCKS, BLOCK_SIZE)
    beams = driver.running
    for _ in range(num_operations):
        operation = numbers.choice(["fork", "fork", "write", "write", "write", "release", "pressure"])
        if not beams:
            driver.start([numbers.randrange(3) for _ in range(numbers.randint(1, 20))])
        elif operation == "fork" and len(beams) < MAX_BEAMS:
            driver.fork(numbers.choice(beams))
        elif operation == "write":
            # One step: each of some beams gets a token and room for it, and all are computed together.
            chosen = numbers.sample(beams, numbers.randint(1, len(beams)))
            for beam in chosen:
                beam.token_ids.append(numbers.randrange(3))
                assert driver.extend(beam, 1)
            driver.execute([(beam, 1) for beam in chosen])
            driver.end_step()
        elif operation == "release" or any(beam.num_tokens > 8 * BLOCK_SIZE for beam in beams):
            driver.finish(numbers.choice(beams))
        elif operation == "pressure":
            driver.evict(numbers.randint(0, driver.cache.stats().num_cached_blocks))
        driver.check()
    while beams:
        driver.finish(beams[-1])
    driver.cache.reset()
    assert driver.cache.stats().num_free_blocks == NUM_BLOCKS


def test_forks_hold_the_blocks_of_their_distinct_prefixes() -> None:
    numbers = random.Random(1)
    for _ in range(20):
        driver = Driver(NUM_BLOCKS, BLOCK_SIZE)
        beams = driver.running
        driver.start([numbers.randrange(3) for _ in range(numbers.randint(1, 20))])
        for _ in range(12):
            for _ in range(numbers.randint(0, 2)):
                driver.fork(numbers.choice(beams))
            while len(beams) > 5:
                driver.finish(numbers.choice(beams))
            # Each of one parent's children takes another token, as beams do.
            tokens = iter(numbers.sample(range(10), len(beams)))
            for beam in beams:
                beam.token_ids.append(next(tokens))
                assert driver.extend(beam, 1)
            driver.execute([(beam, 1) for beam in beams])
            driver.end_step()
            assert driver.cache.stats().num_in_use_blocks == num_blocks_needed(beams)

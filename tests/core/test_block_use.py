"""When blocks were last used, and how often they were found."""

from tests.clock import FakeClock
from tests.core.driver import Driver


def test_a_block_ages_from_when_its_last_holder_gave_it_back() -> None:
    clock = FakeClock(0.0)
    driver = Driver(num_blocks=16, block_size=2, clock=clock)
    sequence = driver.start([5, 6, 7, 8, 9])
    first, second, _ = sequence.block_table
    clock.seconds = 10.0
    driver.finish(sequence)
    assert [driver.cache.use.last_used(block_id) for block_id in (first, second)] == [10.0, 10.0]
    clock.seconds = 20.0
    driver.finish(driver.start([5, 6, 1, 2]))
    assert [driver.cache.use.last_used(block_id) for block_id in (first, second)] == [20.0, 10.0]


def test_hits_are_counted_for_each_block_and_begin_anew_with_its_content() -> None:
    driver = Driver(num_blocks=3, block_size=2)
    sequence = driver.start([5, 6, 7, 8, 9])
    first, second, _ = sequence.block_table
    driver.finish(sequence)
    for _ in range(2):
        driver.finish(driver.start([5, 6, 1]))
    assert [driver.cache.use.num_hits(block_id) for block_id in (first, second)] == [2, 0]
    driver.finish(driver.start([2, 3, 4, 1, 1]))
    assert driver.cache.use.num_hits(first) == 0

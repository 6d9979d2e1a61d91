"""Laws of giving up the K/V of a sequence's last tokens, as a refused draft demands."""

import pytest

from tests.core.driver import Driver, make_sequence

B = 4


def ids(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("num_tokens", range(11))
def test_what_is_given_up_stays_findable_for_others(num_tokens: int) -> None:
    driver = Driver(num_blocks=10, block_size=B)
    sequence = driver.start(ids(10))
    driver.truncate(sequence, num_tokens)
    driver.check()
    assert driver.cache.stats().num_in_use_blocks == -(-num_tokens // B)
    assert driver.num_cached(ids(11)) == 8
    driver.finish(sequence)
    # The part-filled block went with the tokens in it, and no tail is made of a block that is findable.
    assert driver.num_cached(ids(11)) == max(num_tokens, 8)
    driver.check()


@pytest.mark.parametrize("num_tokens", [5, 6, 7])
def test_a_committed_block_is_copied_before_other_tokens_are_written_into_it(num_tokens: int) -> None:
    driver = Driver(num_blocks=10, block_size=B)
    sequence = driver.start(ids(10))
    driver.truncate(sequence, num_tokens, ids(6, 100))
    assert driver.step(sequence, 6)
    driver.check()
    assert driver.num_copies == 1
    driver.finish(sequence)
    assert driver.num_cached([*ids(8), 0]) == 8
    assert driver.num_cached([*ids(num_tokens), *ids(6, 100), 0]) == num_tokens + 6


def test_a_block_of_its_own_is_written_in_place() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    sequence = driver.start(ids(7))
    driver.truncate(sequence, 5, ids(5, 100))
    assert driver.step(sequence, 5)
    driver.check()
    assert driver.num_copies == 0


def test_a_block_shared_with_a_fork_is_copied_and_the_fork_keeps_what_it_has() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    parent = driver.start(ids(7))
    child = driver.fork(parent, [50])
    driver.truncate(parent, 6, [90])
    assert driver.step(parent, 1)
    driver.check()
    assert driver.num_copies == 1
    assert driver.step(child, 1)
    assert driver.num_copies == 1


def test_a_fork_of_a_truncated_sequence_copies_too_even_as_the_last_holder() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    parent = driver.start(ids(8))
    driver.truncate(parent, 6)
    child = driver.fork(parent, [90])
    driver.finish(parent)
    assert driver.step(child, 1)
    driver.check()
    assert driver.num_copies == 1
    assert driver.num_cached([*ids(8), 0]) == 8


def test_the_same_tokens_again_lead_back_to_the_same_block() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    sequence = driver.start(ids(8))
    before = sequence.block_table[:]
    driver.truncate(sequence, 6, [6, 7])
    assert driver.step(sequence, 2)
    driver.check()
    assert sequence.block_table == before


def test_digests_follow_the_tokens() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    sequence, other = driver.start(ids(12)), make_sequence([*ids(6), *ids(6, 100)])
    driver.cache.next_digest(sequence, 2)
    driver.truncate(sequence, 6, ids(6, 100))
    for num_blocks in range(3):
        assert driver.cache.next_digest(sequence, num_blocks) == driver.cache.next_digest(other, num_blocks) is not None


def test_what_was_given_up_is_evicted_before_what_is_above_it() -> None:
    driver = Driver(num_blocks=4, block_size=B)
    sequence = driver.start(ids(16))
    driver.truncate(sequence, 6)
    driver.finish(sequence)
    for remaining in (12, 8, 4, 0):
        driver.evict(1)
        assert driver.num_cached(ids(17)) == remaining
        driver.check()


@pytest.mark.parametrize(("num_tokens", "num_copies"), [(7, 1), (6, 1), (5, 1), (4, 0), (0, 0)])
def test_a_copy_that_is_still_to_be_made_goes_with_the_block_it_was_for(num_tokens: int, num_copies: int) -> None:
    driver = Driver(num_blocks=10, block_size=B)
    driver.run(ids(8))
    sequence = make_sequence([*ids(7), 90])
    assert driver.admit(sequence, 1)
    driver.truncate(sequence, num_tokens, [91])
    # Room for the step that comes instead of the one given up.
    assert driver.extend(sequence, 1)
    assert len(driver.take_copies()) == num_copies
    driver.end_step()
    assert driver.cache.stats().num_in_use_blocks == num_tokens // B + 1


def test_a_source_stays_held_after_a_truncate_inside_its_copy() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    driver.run(ids(8))
    sequence = make_sequence([*ids(7), 90])
    assert driver.admit(sequence, 1)
    driver.execute([(sequence, 1)])
    driver.truncate(sequence, 6, [91])
    assert driver.cache.stats().num_in_use_blocks == 3
    driver.end_step()
    driver.check()
    assert driver.cache.stats().num_in_use_blocks == 2


@pytest.mark.parametrize("num_tokens", [3, 4, 7])
def test_without_a_prefix_cache_what_is_given_up_is_free(num_tokens: int) -> None:
    driver = Driver(num_blocks=10, block_size=B, prefix_cache=False)
    sequence = driver.start(ids(10))
    driver.truncate(sequence, num_tokens, [90])
    assert driver.step(sequence, 1)
    driver.check()
    assert driver.cache.stats().num_free_blocks == 10 - (num_tokens // B + 1)
    assert driver.num_copies == 0


def test_a_tenants_figures_count_a_block_that_was_truncated_into_once() -> None:
    driver = Driver(num_blocks=10, block_size=B)
    sequence = driver.start(ids(10))
    driver.truncate(sequence, 6)
    stats = driver.cache.tenant_stats(None, [sequence], 0)
    assert (stats.num_in_use_blocks, stats.num_cached_blocks) == (2, 0)


def test_no_tail_is_made_of_a_findable_block_however_many_newer_ones_stand_beside_it() -> None:
    driver = Driver(num_blocks=40, block_size=B)
    sequence = driver.start([5, 6, 7, 8])
    for number in range(20):
        driver.run([5, 6, 100 + number, 0])
    driver.truncate(sequence, 3)
    driver.finish(sequence)
    driver.check()
    assert driver.cache.stats().num_cached_blocks == 21

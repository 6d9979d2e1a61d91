"""Laws of the K/V cache, each on the smallest program that shows it."""

import pickle
import random
from itertools import permutations
from typing import get_args

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.eviction.answer import Answer
from radixserve.core.kv_cache import KVCache
from tests.core.driver import Driver, make_sequence

B = 16
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return bytes(16)


def ids(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("num_tokens", [B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_pc_1_a_repeated_prompt_leaves_exactly_one_token_to_compute(num_tokens: int) -> None:
    driver = Driver(num_blocks=16, block_size=B)
    assert driver.run(ids(num_tokens), generated=[7, 8, 9, 10]) == 0
    assert driver.run(ids(num_tokens), generated=[7, 8, 9, 10]) == num_tokens - 1


def test_pc_1_three_equal_prompts_in_one_step_leave_one_token_each() -> None:
    driver = Driver(num_blocks=16, block_size=B)
    driver.run(ids(2 * B))
    batch = [make_sequence(ids(2 * B)) for _ in range(3)]
    for sequence in batch:
        assert driver.admit(sequence, 1)
        assert sequence.num_uncomputed_tokens == 1
    driver.execute([(sequence, 1) for sequence in batch])
    driver.end_step()
    driver.check()
    assert len({tuple(sequence.block_table) for sequence in batch}) == 1


def test_pc_3_a_reused_block_does_not_answer_for_its_old_content() -> None:
    driver = Driver(num_blocks=4, block_size=B)
    for first in (0, 1000, 2000):
        assert driver.run(ids(2 * B, first)) == 0
    assert driver.run(ids(2 * B)) == 0
    assert driver.num_cached(ids(2 * B)) == 2 * B - 1


@pytest.mark.parametrize("options", [{}, {"digest": constant_digest}], ids=["xxh3", "constant digest"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((65, 7), (321, 7)), ((50, 40), (49, 71)), ((50, 40), (81, 39)), ((3, 4), (4, 3))],
    ids=["low byte", "rolling down", "rolling up", "order"],
)
def test_pc_4_a_hit_ends_at_the_first_differing_id(
    options: dict[str, object], left: tuple[int, int], right: tuple[int, int]
) -> None:
    driver = Driver(num_blocks=16, block_size=B, **options)
    for at in (0, 5, B - 2):
        head, rest = ids(at, 10_000 * (at + 1)), ids(2 * B - at - 2, 500)
        assert driver.run([*head, *left, *rest]) == 0
        assert driver.run([*head, *right, *rest]) == at
        driver.cache.reset()


@pytest.mark.parametrize("chunk", [2 * B, 3, 1000])
def test_pc_6_a_hit_does_not_depend_on_chunks(chunk: int) -> None:
    driver = Driver(num_blocks=32, block_size=B)
    assert driver.run(ids(6 * B + 3), chunk=chunk) == 0
    assert driver.run(ids(6 * B + 3), chunk=chunk) == 6 * B + 2
    third = [*ids(5 * B), *ids(B + 3, 900)]
    assert driver.run(third, chunk=chunk) == 5 * B
    for entry in driver.entries():
        assert any(tuple(prompt[: len(entry.token_ids)]) == entry.token_ids for prompt in (ids(6 * B + 3), third))


@pytest.mark.parametrize("at", [0, 1, 510, 511, 512, 513, 4095, 4096, 4097, 4607, 4608, 4609, 4998, 4999])
def test_a_hit_in_a_long_run_ends_at_the_first_differing_id(at: int) -> None:
    cache = KVCache(num_blocks=320, block_size=B)
    sequence = make_sequence(ids(5000))
    assert cache.allocate(sequence, 5000, cache.match(sequence))
    sequence.num_computed_tokens = 5000
    cache.commit(sequence)
    cache.release(sequence)
    assert cache.match(make_sequence([*ids(at), 9999, *ids(5000 - at, at + 1)])).num_tokens == at


def test_pc_7_namespaces_share_nothing() -> None:
    driver = Driver(num_blocks=16, block_size=4)
    for namespace in (b"a", b"ab", b""):
        assert driver.run(ids(10), namespace=namespace) == 0
    for namespace in (b"a", b"ab", b""):
        assert driver.num_cached(ids(10), namespace=namespace) == 9


def test_an_emptied_namespace_leaves_nothing_behind() -> None:
    sizes = []
    driver = Driver(num_blocks=16, block_size=4, eviction_policy="lru", max_lost_blocks=0)
    for num_namespaces in (1, 100):
        for index in range(num_namespaces):
            driver.run(ids(10), namespace=b"%d" % index)
        driver.cache.reset()
        sizes.append(len(pickle.dumps(driver.cache)))
    assert sizes[1] < sizes[0] + 50


def test_pc_9_an_answer_is_cached_for_the_next_turn_but_for_its_last_token() -> None:
    driver = Driver(num_blocks=16, block_size=B)
    prompt, answer = ids(2 * B), ids(2 * B, 500)
    driver.run(prompt, generated=answer)
    assert driver.num_cached([*prompt, *answer, 999]) == 4 * B - 1


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_rt_1_eviction_takes_nothing_of_a_path_in_use(eviction_policy: EvictionPolicy) -> None:
    driver = Driver(num_blocks=3, block_size=2, eviction_policy=eviction_policy)
    driver.run(ids(2))
    sequence = driver.start(ids(4))
    held = sequence.block_table[:]
    other = make_sequence(ids(4, 100))
    assert not driver.admit(other, 4)
    assert sequence.block_table == held
    assert driver.cache.stats().num_evicted_tokens == 0
    driver.finish(sequence)
    driver.evict(2)
    driver.check()
    assert driver.cache.stats().num_free_blocks == 3


def test_rt_1_to_hold_a_path_and_let_it_go_leaves_every_count_as_before() -> None:
    driver = Driver(num_blocks=3, block_size=2)
    driver.run(ids(2))
    driver.run(ids(4))
    before = driver.cache.stats()
    sequence = make_sequence(ids(5))
    assert driver.admit(sequence, 0)
    assert driver.cache.stats().num_in_use_blocks == 2
    assert not driver.admit(make_sequence(ids(4, 100)), 4)
    driver.finish(sequence)
    driver.check()
    after = driver.cache.stats()
    assert (after.num_free_blocks, after.num_cached_blocks) == (before.num_free_blocks, before.num_cached_blocks)
    assert (after.num_tree_nodes, after.num_evicted_tokens) == (before.num_tree_nodes, 0)


def test_rt_2_sizes_stay_right_over_a_split() -> None:
    driver = Driver(num_blocks=20, block_size=1)
    driver.run(ids(8, 1))
    driver.run([1, 2, 3, 9, 10])
    stats = driver.cache.stats()
    assert stats.num_cached_blocks == 10
    assert (stats.num_tree_nodes, stats.tree_depth) == (3, 2)
    # All but one token of a prompt are attached, so a sixth token holds the five.
    sequence = driver.start([1, 2, 3, 9, 10, 11])
    stats = driver.cache.stats()
    assert (stats.num_in_use_blocks, stats.num_cached_blocks) == (6, 5)
    driver.finish(sequence)
    driver.evict(11)
    stats = driver.cache.stats()
    assert (stats.num_free_blocks, stats.num_evicted_tokens) == (20, 11)
    assert (stats.num_tree_nodes, stats.tree_depth) == (0, 0)


def test_rt_2_sizes_stay_right_over_5000_random_operations() -> None:
    numbers = random.Random(2)
    driver = Driver(num_blocks=40, block_size=1, max_lost_blocks=64)
    for _ in range(5000):
        operation = numbers.choice(["insert", "match", "lock", "lock", "unlock", "unlock", "evict"])
        prompt = [numbers.randrange(2) for _ in range(numbers.randint(1, 9))]
        if operation == "insert" and len(driver.running) < 3:
            driver.finish(driver.start(prompt))
        elif operation == "match":
            driver.check_match(make_sequence(prompt))
        elif operation == "lock" and len(driver.running) < 3:
            driver.start(prompt)
        elif operation == "unlock" and driver.running:
            driver.finish(numbers.choice(driver.running))
        elif operation == "evict":
            driver.evict(numbers.randint(0, driver.cache.stats().num_cached_blocks))
        # Recounts what is free, cached and in use, all tokens that were evicted, and the nodes of the tree.
        driver.check()
    for sequence in driver.running[:]:
        driver.finish(sequence)
    driver.evict(driver.cache.stats().num_cached_blocks)
    assert driver.cache.stats().num_free_blocks == 40


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("is_warm", [False, True])
def test_rt_3_a_key_shorter_than_a_block_is_a_tail_and_counts(num_tokens: int, is_warm: bool) -> None:
    driver = Driver(num_blocks=16, block_size=4)
    if is_warm:
        driver.run([0, 1, 2, 99, 98])
    assert driver.run(ids(num_tokens)) == (min(num_tokens - 1, 3) if is_warm else 0)
    assert driver.num_cached([*ids(num_tokens), 50]) == num_tokens
    assert driver.cache.stats().num_in_use_blocks == 0


def test_rt_3_a_prompt_of_no_more_than_one_token_finds_nothing() -> None:
    driver = Driver(num_blocks=16, block_size=4)
    driver.run(ids(8))
    assert driver.num_cached([]) == driver.num_cached([0]) == 0


def test_rt_4_of_two_equal_prefixes_computed_at_once_one_stays() -> None:
    driver = Driver(num_blocks=20, block_size=4)
    twins = [make_sequence([*ids(16), 100 + index]) for index in range(2)]
    for sequence in twins:
        assert driver.admit(sequence, 17)
    assert driver.cache.stats().num_in_use_blocks == 10
    driver.execute([(sequence, 17) for sequence in twins])
    driver.end_step()
    assert twins[0].block_table[:4] == twins[1].block_table[:4]
    assert driver.cache.stats().num_in_use_blocks == 6
    third = driver.start(ids(16, 500))
    for sequence in (*twins, third):
        driver.generate(sequence, ids(6, 900))
        driver.check()


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_rt_5_the_end_of_a_prefix_is_evicted_before_its_head(eviction_policy: EvictionPolicy) -> None:
    driver = Driver(num_blocks=3, block_size=4, eviction_policy=eviction_policy)
    driver.run(ids(12))
    driver.evict(1)
    assert driver.num_cached(ids(12)) == 8


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
@pytest.mark.parametrize("num_evicted", [1, 2])
def test_rt_5_a_shared_head_outlives_its_branches(num_evicted: int, eviction_policy: EvictionPolicy) -> None:
    driver = Driver(num_blocks=3, block_size=4, eviction_policy=eviction_policy)
    left, right = ids(8), [*ids(4), *ids(4, 100)]
    driver.run(left)
    driver.run(right)
    driver.evict(num_evicted)
    assert driver.num_cached([*left, 0]) == 4
    assert driver.num_cached([*right, 0]) == (8 if num_evicted == 1 else 4)
    driver.check()


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_rt_6_a_reset_drops_what_is_idle_and_says_what_it_kept(eviction_policy: EvictionPolicy) -> None:
    driver = Driver(num_blocks=10, block_size=4, eviction_policy=eviction_policy)
    driver.run(ids(8, 500))
    sequence = driver.start(ids(10))
    assert driver.cache.reset() == (2, 2)
    driver.check()
    assert driver.num_cached(ids(8, 500)) == 0
    assert driver.num_cached(ids(10)) == 8
    driver.generate(sequence, ids(4, 700))
    driver.finish(sequence)
    assert driver.run(ids(10)) == 9
    driver.cache.reset()
    assert driver.cache.stats().num_free_blocks == 10
    assert driver.cache.stats().num_evicted_tokens == 0


@pytest.mark.parametrize("order", [(3,), *permutations([2, 5]), *permutations([2, 4, 6])])
def test_rt_7_a_split_run_stays_held_on_both_sides(order: tuple[int, ...]) -> None:
    driver = Driver(num_blocks=24, block_size=1)
    driver.run(ids(8))
    holders = [driver.start([*ids(8), 50]), driver.start([*ids(8), 51])]
    for at in order:
        driver.run([*ids(at), 100 + at])
        driver.check()
    for holder in holders:
        driver.evict(driver.cache.stats().num_cached_blocks)
        driver.check()
        assert driver.cache.stats().num_cached_blocks == 0
        assert driver.num_cached([*ids(8), 0]) == 8
        driver.finish(holder)
    driver.evict(driver.cache.stats().num_cached_blocks)
    assert driver.cache.stats().num_free_blocks == 24


def test_a_wholly_matched_tail_is_taken_over_without_a_copy() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    driver.run(ids(6))
    sequence = driver.start(ids(7))
    assert driver.num_copies == 0
    assert driver.cache.stats().num_in_use_blocks == 2
    assert driver.cache.stats().num_cached_blocks == 0
    driver.finish(sequence)
    assert driver.num_cached(ids(8)) == 7


def test_a_partly_matched_tail_is_copied_and_stays() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    driver.run(ids(7))
    driver.run([*ids(6), 90])
    assert driver.num_copies == 1
    assert driver.num_cached([*ids(7), 0]) == driver.num_cached([*ids(6), 90, 0]) == 7


def test_a_tail_that_another_copies_from_in_the_same_step_is_not_taken_over() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    driver.run(ids(7))
    copying, repeating = make_sequence([*ids(6), 90]), make_sequence(ids(8))
    assert driver.admit(copying, 1)
    assert driver.admit(repeating, 1)
    driver.execute([(copying, 1), (repeating, 1)])
    driver.end_step()
    assert driver.num_copies == 2
    driver.check()


def test_a_tail_goes_once_a_full_block_covers_it() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    first, second = driver.start(ids(6)), driver.start(ids(8))
    driver.finish(first)
    assert driver.cache.stats().num_cached_blocks == 0
    driver.finish(second)
    assert driver.cache.stats().num_cached_blocks == 2
    assert driver.cache.stats().num_tree_nodes == 1


def test_a_tail_goes_when_the_full_block_comes_after_it() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    first, second = driver.start(ids(6)), driver.start(ids(7))
    driver.finish(first)
    assert driver.cache.stats().num_tree_nodes == 2
    driver.generate(second, [7, 8])
    assert driver.cache.stats().num_tree_nodes == 1
    driver.finish(second)
    assert driver.cache.stats().num_free_blocks == 8
    driver.check()


def test_of_two_tails_that_begin_alike_the_longer_one_stays() -> None:
    for lengths in ((6, 7), (7, 6)):
        driver = Driver(num_blocks=10, block_size=4)
        sequences = [driver.start(ids(length)) for length in lengths]
        for sequence in sequences:
            driver.finish(sequence)
        assert driver.num_cached(ids(8)) == 7
        assert driver.cache.stats().num_cached_blocks == 2


def test_a_fork_copies_only_the_block_that_is_written_and_only_once() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    parent = driver.start(ids(6))
    child = driver.fork(parent, [90])
    assert driver.cache.stats().num_in_use_blocks == 2
    parent.token_ids.append(80)
    for sequence in (child, parent):
        assert driver.extend(sequence, 1)
    driver.execute([(child, 1), (parent, 1)])
    driver.end_step()
    driver.check()
    assert driver.num_copies == 1
    assert driver.cache.stats().num_in_use_blocks == 3
    assert child.block_table[0] == parent.block_table[0]


def test_the_last_of_many_forks_writes_in_place() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    parent = driver.start(ids(6))
    children = [driver.fork(parent, [90 + index]) for index in range(3)]
    driver.finish(parent)
    for child in children:
        assert driver.extend(child, 1)
    driver.execute([(child, 1) for child in children])
    driver.end_step()
    driver.check()
    assert driver.num_copies == 2
    assert driver.cache.stats().num_in_use_blocks == 4


def test_a_fork_commits_what_its_parent_has_computed() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    parent, child = make_sequence(ids(6)), make_sequence([*ids(6), 90])
    assert driver.admit(parent, 6)
    parent.num_computed_tokens = 6
    driver.cache.fork(parent, child)
    assert child.num_committed_blocks == parent.num_committed_blocks == 1
    assert driver.cache.stats().num_tree_nodes == 1


def test_a_fork_does_not_inherit_digests_of_tokens_it_does_not_share() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    parent = driver.start(ids(6))
    parent.token_ids.extend([80, 81])
    digest = driver.cache.next_digest(parent, 1)
    child = driver.fork(parent, [90, 91])
    assert driver.cache.next_digest(child, 0) == driver.cache.next_digest(parent, 0)
    assert driver.cache.next_digest(child, 1) != digest


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_copy_source_stays_in_use_though_its_last_holder_goes(prefix_cache: bool) -> None:
    driver = Driver(num_blocks=10, block_size=4, prefix_cache=prefix_cache)
    parent = driver.start(ids(6))
    child = driver.fork(parent, [90])
    assert driver.extend(child, 1)
    driver.execute([(child, 1)])
    driver.finish(parent)
    assert driver.cache.stats().num_in_use_blocks == 3
    driver.end_step()
    assert driver.cache.stats().num_in_use_blocks == 2
    driver.check()


def test_a_copy_source_counts_as_in_use_until_the_step_ends() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    driver.run(ids(4))
    sequence = make_sequence([*ids(3), 90])
    assert driver.admit(sequence, 1)
    assert driver.cache.stats().num_in_use_blocks == 2
    driver.execute([(sequence, 1)])
    assert driver.cache.stats().num_in_use_blocks == 2
    driver.end_step()
    driver.check()
    assert driver.cache.stats().num_in_use_blocks == 1


def test_copies_are_handed_out_once_and_not_for_a_sequence_that_is_gone() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    driver.run(ids(4))
    for is_released in (False, True):
        sequence = make_sequence([*ids(3), 90])
        assert driver.admit(sequence, 1)
        if is_released:
            driver.finish(sequence)
        assert len(driver.cache.take_copies()) == (not is_released)
        assert driver.cache.take_copies() == []
        if not is_released:
            driver.finish(sequence)
        driver.end_step()
        driver.check()


def test_a_block_whose_copy_may_never_have_run_is_not_kept() -> None:
    driver = Driver(num_blocks=10, block_size=4)
    driver.run(ids(4))
    sequence = make_sequence([*ids(3), 90])
    assert driver.admit(sequence, 1)
    driver.cache.take_copies()
    driver.finish(sequence)
    driver.end_step()
    assert driver.cache.stats().num_cached_blocks == 1
    driver.check()


def test_without_room_for_the_source_of_a_copy_the_full_blocks_are_attached() -> None:
    for num_blocks, num_attached in ((3, 7), (2, 4)):
        driver = Driver(num_blocks, block_size=4)
        driver.run(ids(8))
        sequence = make_sequence([*ids(7), 90])
        assert driver.admit(sequence, 1)
        assert sequence.num_computed_tokens == num_attached
        driver.compute(sequence, 1)
        driver.check()
        assert driver.num_copies == (num_attached == 7)


def test_a_hit_is_not_evicted_to_make_room_for_the_rest_of_its_own_prompt() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    driver.run(ids(12))
    assert not driver.admit(make_sequence(ids(20)), 8)
    assert driver.num_cached(ids(13)) == 12
    assert driver.admit(make_sequence(ids(20)), 4)


def test_ages_are_right_after_a_hit_inside_a_run() -> None:
    driver = Driver(num_blocks=9, block_size=1, eviction_policy="lru")
    driver.run(ids(4))
    driver.run(ids(3, 100))
    driver.run([0, 1])
    # From oldest to newest: 3 2, then 102 101 100, then 1 0.
    for remaining in (3, 2, 2, 2, 2, 1, 0):
        driver.evict(1)
        assert driver.num_cached(ids(5)) == remaining
        driver.check()


def test_a_lookup_that_has_gone_stale_is_made_again() -> None:
    driver = Driver(num_blocks=2, block_size=4)
    driver.run(ids(8))
    sequence = make_sequence(ids(9))
    match = driver.check_match(sequence)
    assert match.num_tokens == 8
    driver.run(ids(8, 100))
    assert driver.admit(sequence, 4, match)
    assert sequence.num_computed_tokens == 0


def test_forks_with_uncommitted_blocks_do_not_enter_the_tree_below_another_path() -> None:
    """A colliding digest keeps blocks out of the tree until its owner is gone; by then another has computed them."""
    driver = Driver(num_blocks=12, block_size=1, digest=constant_digest)
    collider = driver.start([9])
    parent = driver.start([0, 1])
    child = driver.fork(parent)
    driver.finish(collider)
    driver.cache.reset()
    other = driver.start([0])
    driver.cache.commit(parent)
    driver.check()
    for sequence in (other, parent):
        driver.finish(sequence)
    driver.cache.reset()
    driver.check()
    driver.cache.commit(child)
    driver.finish(child)
    driver.check()


def test_equal_digests_mean_the_same_block_to_come() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    left, right = make_sequence(ids(9)), make_sequence([*ids(4), *ids(4, 50)])
    assert driver.cache.next_digest(left, 0) == driver.cache.next_digest(right, 0) is not None
    assert driver.cache.next_digest(left, 1) != driver.cache.next_digest(right, 1)
    assert driver.cache.next_digest(left, 2) is None
    assert driver.cache.next_digest(make_sequence(ids(9), b"a"), 0) != driver.cache.next_digest(left, 0)


def test_without_a_prefix_cache_nothing_is_found_and_forks_still_share() -> None:
    driver = Driver(num_blocks=8, block_size=4, prefix_cache=False)
    for _ in range(2):
        assert driver.run(ids(10)) == 0
        assert driver.cache.stats().num_free_blocks == 8
    assert driver.cache.next_digest(make_sequence(ids(10)), 0) is None
    parent = driver.start(ids(10))
    child = driver.fork(parent, [90])
    assert driver.step(child, 1)
    driver.check()
    assert driver.cache.stats().num_in_use_blocks == 4
    assert driver.num_copies == 1


def test_queries_and_hits_are_counted() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.cache.record_query(None, 10, 0)
    driver.cache.record_query(None, 20, 9)
    stats = driver.cache.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (30, 9)


def test_whole_blocks_are_found_among_any_number_and_inside_a_block_the_newest_are_compared() -> None:
    driver = Driver(num_blocks=200, block_size=4)
    for index in range(100):
        driver.finish(driver.start([5, 6, index, 0] if index % 2 else [5, 6, index]))
    for index in (1, 51, 99):
        assert driver.num_cached([5, 6, index, 0, 7]) == 4
    assert driver.num_cached([5, 6, 98, 0]) == 3
    assert driver.num_cached([5, 6, 0, 0]) == 2


def test_an_earlier_match_is_no_proof_of_blocks_that_were_filled_anew() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    driver.run(ids(16))
    sequence = make_sequence(ids(17))
    earlier = driver.cache.match(sequence)
    assert earlier.num_tokens == 16
    driver.evict(2)
    # The same run grows again, into the same blocks, with other tokens in the first of them only.
    driver.run([*ids(8), *ids(4, 100), *ids(4, 12)])
    assert driver.cache.match(sequence, earlier) == driver.cache.match(sequence)
    assert driver.cache.match(sequence, earlier).num_tokens == 8


def test_an_earlier_match_is_not_compared_again() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.run(ids(12))
    sequence = make_sequence([*ids(12), 50, 51])
    earlier = driver.cache.match(sequence)
    driver.run([*ids(12), 50, 60])
    # A caller who breaks the rule that only tokens behind the match change is not found out.
    sequence.token_ids[0] = 99
    assert driver.cache.match(sequence, earlier).num_tokens == 13


@pytest.mark.parametrize("is_told_before_release", [True, False])
def test_what_becomes_of_an_answer_changes_no_match(is_told_before_release: bool) -> None:
    driver = Driver(num_blocks=8, block_size=2)
    sequence = driver.start([1, 2, 3, 4, 5])
    answer = Answer(calls_tool=True, num_tokens=1)
    if is_told_before_release:
        driver.cache.record_answer(sequence, answer)
    driver.finish(sequence)
    if not is_told_before_release:
        driver.cache.record_answer(sequence, answer)
    assert driver.num_cached([1, 2, 3, 4, 5, 6]) == 5
    driver.check()

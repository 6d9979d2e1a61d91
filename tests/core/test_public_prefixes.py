"""Laws of public prefixes in the cache: all tenants share their blocks, and nothing behind them."""

import pickle
from array import array
from typing import Any

import pytest

from radixserve.core.namespace import encode_namespace
from radixserve.core.public_prefixes import CachePath, PublicPrefixes
from tests.core.driver import MAX_CANDIDATES, Driver, make_sequence

B = 4
PUBLIC = list(range(100, 100 + 3 * B))
A, OTHER, UNNAMED = encode_namespace(tenant="a"), encode_namespace(tenant="b"), encode_namespace()
SALTED = encode_namespace(tenant="a", salt="s")
ADAPTED = encode_namespace(tenant="a", adapter="s")
REBUILT = encode_namespace(tenant="a", build="s")


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return bytes(16)


def public_driver(*prefixes: list[int], num_blocks: int = 64, **options: Any) -> Driver:
    return Driver(num_blocks, B, public_prefixes=prefixes or (PUBLIC,), **options)


def own(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


DIGESTS = pytest.mark.parametrize("options", [{}, {"digest": constant_digest}], ids=["xxh3", "constant digest"])


@DIGESTS
def test_pc_7_tenants_share_the_public_blocks_and_nothing_behind_them(options: dict[str, Any]) -> None:
    driver = public_driver(**options)
    prompt = PUBLIC + own(2 * B + 1)
    assert driver.run(prompt, namespace=A) == 0
    for namespace in (OTHER, UNNAMED):
        assert driver.run(prompt, namespace=namespace) == len(PUBLIC)
    for namespace in (A, OTHER, UNNAMED):
        assert driver.num_cached(prompt, namespace=namespace) == len(prompt) - 1


def test_pc_7_a_salt_an_adapter_and_another_build_share_no_public_blocks() -> None:
    driver = public_driver()
    prompt = PUBLIC + own(B)
    namespaces = (A, SALTED, ADAPTED, REBUILT)
    assert [driver.run(prompt, namespace=namespace) for namespace in namespaces] == [0] * 4
    assert [driver.run(prompt, namespace=namespace) for namespace in namespaces] == [len(prompt) - 1] * 4
    other_tenants = [
        encode_namespace(tenant="b", **fields) for fields in ({"salt": "s"}, {"adapter": "s"}, {"build": "s"})
    ]
    assert [driver.run(prompt, namespace=namespace) for namespace in other_tenants] == [0, len(PUBLIC), len(PUBLIC)]


@DIGESTS
def test_a_prompt_goes_through_the_longest_prefix_that_it_begins_with(options: dict[str, Any]) -> None:
    longer = PUBLIC + own(2 * B, 500)
    driver = public_driver(longer, PUBLIC, PUBLIC[:B], **options)
    between = [*longer[: len(PUBLIC) + B], 7, 8, 9]
    assert driver.run(longer + own(3), namespace=A) == 0
    assert driver.run(longer + own(3), namespace=OTHER) == len(longer)
    assert driver.run(between, namespace=OTHER) == len(PUBLIC), "the block behind is that of another public prefix"
    assert driver.run(between, namespace=A) == len(PUBLIC)
    assert driver.run([*PUBLIC[:B], 1, 2], namespace=UNNAMED) == B
    for namespace in (A, OTHER):
        assert driver.num_cached(between, namespace=namespace) == len(between) - 1
        assert driver.num_cached([*longer, 5, 5], namespace=namespace) == len(longer)


def test_what_a_tenant_has_behind_a_public_prefix_stays_while_longer_ones_come_and_go() -> None:
    longer = [PUBLIC + own(B, first) for first in (500, 600)]
    driver = public_driver(PUBLIC, *longer, num_blocks=7)
    prompt = PUBLIC + own(B + 1)
    driver.run(longer[0] + own(1), namespace=OTHER)
    driver.cache.reset("b")
    for expected in (len(PUBLIC), len(prompt) - 1):
        assert driver.run(prompt, namespace=A) == expected
    driver.run(longer[1], namespace=OTHER)
    assert driver.cache.stats().num_free_blocks == 0
    # The oldest block is that of the first longer prefix: two followers are left of three.
    driver.evict(1)
    driver.check()
    assert driver.num_cached([*longer[0], 7], namespace=UNNAMED) == len(PUBLIC)
    assert driver.num_cached([*longer[1], 7], namespace=UNNAMED) == len(longer[1])
    assert driver.num_cached(prompt, namespace=A) == len(prompt) - 1


def test_a_longer_public_prefix_may_come_after_what_lies_behind_a_shorter_one() -> None:
    driver = public_driver(PUBLIC, PUBLIC + own(B, 500))
    driver.run(PUBLIC + own(B), namespace=A)
    driver.run(PUBLIC + own(B + 1, 500), namespace=OTHER)
    assert driver.num_cached(PUBLIC + own(B), namespace=A) == len(PUBLIC) + B - 1


@pytest.mark.parametrize("num_followed", [1, B, 2 * B, 3 * B - 1])
def test_a_prompt_that_leaves_a_public_prefix_shares_nothing_of_it(num_followed: int) -> None:
    driver = public_driver()
    prompt = PUBLIC[:num_followed] + own(2 * B)
    driver.run(PUBLIC + own(1), namespace=A)
    assert driver.run(prompt, namespace=A) == 0
    assert driver.run(prompt, namespace=OTHER) == 0


def test_a_prompt_that_is_a_public_prefix_computes_its_last_token_alone_and_keeps_no_copy() -> None:
    driver = public_driver()
    driver.run(PUBLIC, namespace=A)
    assert driver.run(PUBLIC, namespace=OTHER) == len(PUBLIC) - 1
    assert driver.num_copies == 1
    assert driver.cache.stats().num_cached_blocks == len(PUBLIC) // B


@DIGESTS
def test_a_hit_inside_the_block_behind_the_border_is_a_tenants_own(options: dict[str, Any]) -> None:
    driver = public_driver(**options)
    driver.run(PUBLIC + own(B), namespace=A)
    driver.run([*PUBLIC, 0, 1, 2], namespace=OTHER)
    assert driver.num_cached([*PUBLIC, 0, 1, 9, 9], namespace=UNNAMED) == len(PUBLIC)
    assert driver.run([*PUBLIC, 0, 1, 9, 9], namespace=A) == len(PUBLIC) + 2
    assert driver.num_copies == 1
    assert driver.num_cached([*PUBLIC, 0, 1, 2, 9], namespace=OTHER) == len(PUBLIC) + 3


def test_another_tenants_blocks_hide_none_of_a_tenants_own() -> None:
    driver = public_driver()
    driver.run([*PUBLIC, 0, 1, 2], namespace=A)
    for number in range(MAX_CANDIDATES):
        driver.run([*PUBLIC, 0, 50 + number, 9], namespace=OTHER)
    assert driver.num_cached([*PUBLIC, 0, 1, 2, 9], namespace=A) == len(PUBLIC) + 3
    driver.run([*PUBLIC, 0, 99, 9], namespace=OTHER)
    for number in range(MAX_CANDIDATES):
        driver.run([*PUBLIC, 0, 70 + number, 9], namespace=A)
    assert driver.num_cached([*PUBLIC, 0, 1, 2, 9], namespace=A) == len(PUBLIC) + 1, "so many are compared, no more"


def test_a_forged_digest_keeps_no_other_tenants_block_out_of_the_cache() -> None:
    driver = public_driver(digest=constant_digest)
    driver.run(PUBLIC + own(B), namespace=OTHER)
    prompt = PUBLIC + own(B, 50)
    assert driver.run(prompt, namespace=A) == len(PUBLIC)
    assert driver.num_cached(prompt, namespace=A) == len(prompt) - 1


def test_tenants_that_are_about_to_compute_the_same_block_have_one_digest_for_it_up_to_the_border() -> None:
    driver = public_driver()
    sequences = [make_sequence(PUBLIC + own(2 * B), namespace) for namespace in (A, OTHER)]
    for index in range(5):
        digests = {driver.cache.next_digest(sequence, index) for sequence in sequences}
        namespaces = {driver.cache.namespace_of(sequence, index) for sequence in sequences}
        assert len(digests) == len(namespaces) == (1 if index < 3 else 2)


def test_what_lies_behind_a_public_prefix_is_evicted_before_it() -> None:
    driver = public_driver(num_blocks=8)
    driver.run(PUBLIC + own(B), namespace=A)
    driver.run(PUBLIC + own(B), namespace=OTHER)
    for num_left in (4, 3, 2, 1, 0):
        driver.evict(1)
        driver.check()
        assert driver.cache.stats().num_cached_blocks == num_left
        assert driver.num_cached(PUBLIC + own(B), namespace=UNNAMED) == min(num_left, 3) * B
    assert driver.cache.stats().num_evicted_tokens == len(PUBLIC) + 2 * B


def test_a_block_behind_a_public_prefix_keeps_the_prefix_in_use() -> None:
    driver = public_driver(num_blocks=4)
    driver.run(PUBLIC, namespace=OTHER)
    sequence = driver.start(PUBLIC + own(2), namespace=A)
    assert driver.cache.stats().num_in_use_blocks == 4
    assert not driver.admit(make_sequence(own(1)), 1)
    driver.finish(sequence)
    driver.check()


def test_a_tenants_reset_drops_its_own_blocks_and_no_public_one() -> None:
    driver = public_driver()
    for namespace in (A, SALTED, OTHER, UNNAMED):
        driver.run(PUBLIC + own(B), namespace=namespace)
    assert driver.cache.reset("a") == (1 + 4, 0)
    driver.check()
    assert driver.num_cached(PUBLIC + own(B), namespace=A) == len(PUBLIC)
    assert driver.num_cached(PUBLIC + own(B), namespace=OTHER) == len(PUBLIC) + B - 1
    assert driver.cache.reset() == (3 + 2, 0)
    assert driver.cache.stats().num_free_blocks == driver.num_blocks


def test_a_tenants_figures_count_public_blocks_only_while_its_requests_hold_them() -> None:
    driver = public_driver()
    driver.run(PUBLIC + own(2 * B), namespace=OTHER)
    sequence = driver.start(PUBLIC + own(B + 1), namespace=A)
    running, idle = (driver.cache.tenant_stats(tenant, held, 0) for tenant, held in (("a", [sequence]), ("b", [])))
    assert (running.num_in_use_blocks, running.num_cached_blocks) == (5, 0)
    assert (idle.num_in_use_blocks, idle.num_cached_blocks) == (0, 2)
    driver.finish(sequence)
    ended = driver.cache.tenant_stats("a", [], 0)
    assert (ended.num_in_use_blocks, ended.num_cached_blocks) == (0, 2)
    assert driver.cache.tenant_stats(None, [], 0).num_cached_blocks == 0
    assert driver.cache.stats().num_cached_blocks == 3 + 2 + 2
    driver.evict(7)
    evicted = [driver.cache.tenant_stats(tenant, [], 0).num_evicted_tokens for tenant in ("a", "b", None)]
    assert evicted == [B + 1, 2 * B, 0]
    assert driver.cache.stats().num_evicted_tokens == sum(evicted) + len(PUBLIC)


def test_a_tail_is_taken_over_behind_the_border_and_goes_once_it_is_covered() -> None:
    driver = public_driver()
    driver.run([*PUBLIC, 1, 2], namespace=A)
    driver.run([*PUBLIC, 1, 2], namespace=OTHER)
    assert driver.num_copies == 0
    assert driver.run([*PUBLIC, 1, 2, 3, 4], namespace=A) == len(PUBLIC) + 2
    assert driver.num_copies == 0
    assert driver.cache.stats().num_cached_blocks == 3 + 2
    assert driver.cache.stats().num_tree_nodes == 3


def test_a_prompt_cut_off_inside_a_public_prefix_leaves_it_for_all() -> None:
    driver = public_driver()
    sequence = make_sequence(PUBLIC + own(3), A)
    assert driver.admit(sequence, B + 2)
    driver.compute(sequence, B + 2)
    driver.finish(sequence)
    driver.check()
    assert driver.run(PUBLIC + own(3), namespace=OTHER) == B + 2


@pytest.mark.parametrize("num_behind", [0, 1, B])
def test_forks_across_the_border_share_until_they_write(num_behind: int) -> None:
    driver = public_driver()
    parent = driver.start(PUBLIC + own(num_behind), namespace=A)
    children = [driver.fork(parent, own(B + 1, 60 * number)) for number in range(1, 4)]
    assert driver.cache.stats().num_in_use_blocks == 3 + (num_behind > 0)
    for child in children:
        assert driver.step(child, child.num_uncomputed_tokens)
        driver.check()
    for sequence in (parent, *children):
        driver.finish(sequence)
        driver.check()
    for child in children:
        prompt = [*child.token_ids, 9]
        assert driver.num_cached(prompt, namespace=A) == len(prompt) - 1
        assert driver.num_cached(prompt, namespace=OTHER) == len(PUBLIC)


def test_an_answer_that_completes_a_public_prefix_stays_its_tenants_own() -> None:
    driver = public_driver()
    driver.run(PUBLIC[: 2 * B], generated=[*PUBLIC[2 * B :], 7], namespace=A)
    assert driver.num_cached([*PUBLIC, 7], namespace=OTHER) == 0
    assert driver.num_cached([*PUBLIC[: 2 * B], 7], namespace=A) == 2 * B


def test_of_tenants_that_compute_a_public_prefix_at_once_one_keeps_its_blocks() -> None:
    driver = public_driver()
    twins = [make_sequence([*PUBLIC, 1], namespace) for namespace in (A, OTHER)]
    for sequence in twins:
        assert driver.admit(sequence, sequence.num_tokens)
    driver.execute([(sequence, sequence.num_tokens) for sequence in twins])
    driver.end_step()
    driver.check()
    assert twins[0].block_table[:3] == twins[1].block_table[:3]
    assert driver.cache.stats().num_in_use_blocks == 3 + 2


def test_nothing_is_left_of_what_a_tenant_had_behind_a_public_prefix() -> None:
    sizes = []
    driver = public_driver(PUBLIC, PUBLIC[:B], eviction_policy="lru")
    for num_rounds in (1, 100):
        for number in range(num_rounds):
            driver.run([*PUBLIC, number], namespace=A)
            driver.run([*PUBLIC[:B], number], namespace=A)
            driver.cache.reset("a")
        driver.check()
        assert driver.cache.stats().num_cached_blocks == 3
        assert driver.cache.stats().num_tree_nodes == 1
        driver.cache.reset()
        sizes.append(len(pickle.dumps(driver.cache)))
    assert sizes[1] < sizes[0] + 50


def test_without_public_prefixes_every_path_is_its_namespace() -> None:
    assert PublicPrefixes([], B).path_of(A, array("i", PUBLIC)) == CachePath(A)

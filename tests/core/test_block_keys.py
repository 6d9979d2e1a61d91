"""Names of blocks: equal for what holds equal K/V, and for nothing else."""

from dataclasses import replace

import pytest

from radixserve.core.block_store import NAME_BYTES
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.namespace import encode_namespace
from tests.core.driver import Driver, make_sequence

SETTINGS = CacheSettings(build=b"model", public_prefixes=[[1, 2]])
ALICE, BOB = (encode_namespace(tenant=name) for name in ("alice", "bob"))


def names(token_ids: list[int], namespace: bytes = ALICE, settings: CacheSettings = SETTINGS) -> list[bytes]:
    cache = KVCache(8, 2, settings)
    sequence = make_sequence(token_ids, namespace)
    return [cache.keys.name_of(sequence, index) for index in range(len(token_ids) // 2)]


def test_a_prompt_has_the_same_names_in_every_cache() -> None:
    assert names([5, 6, 7, 8]) == names([5, 6, 7, 8])
    assert names([5, 6, 7, 8])[:1] == names([5, 6, 9, 8])[:1]
    assert all(len(name) == NAME_BYTES for name in names([5, 6, 7, 8]))


@pytest.mark.parametrize(
    "other",
    [
        names([5, 6, 7, 8], BOB),
        names([5, 6, 7, 8], encode_namespace(tenant="alice", salt="s")),
        names([5, 6, 7, 8], settings=replace(SETTINGS, build=b"other")),
        names([5, 7, 6, 8]),
        names([7, 8, 5, 6]),
    ],
)
def test_what_holds_other_keys_and_values_has_another_name(other: list[bytes]) -> None:
    assert set(names([5, 6, 7, 8])).isdisjoint(other)


def test_tenants_have_the_same_names_for_public_blocks_and_others_behind_them() -> None:
    alice, bob = names([1, 2, 5, 6]), names([1, 2, 5, 6], BOB)
    assert alice[0] == bob[0]
    assert alice[1] != bob[1]


def test_names_follow_a_sequence_through_fork_and_truncate() -> None:
    driver = Driver(num_blocks=16, block_size=2)
    parent = driver.start([5, 6, 7, 8, 9])
    fresh = driver.cache.keys.name_of(parent, 1)
    child = driver.fork(parent, [1, 2])
    driver.truncate(child, 3, [3, 4])
    assert driver.cache.keys.name_of(child, 1) == KVCache(8, 2).keys.name_of(make_sequence([5, 6, 7, 3]), 1)
    assert driver.cache.keys.name_of(parent, 1) == fresh

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis.stateful import invariant

from radixserve.core.block_store import OWNER_BYTES
from radixserve.core.namespace import encode_namespace, is_public
from radixserve.core.public_prefixes import CachePath
from radixserve.events.cache_events import CacheEvents
from radixserve.events.schema import AllBlocksCleared, BlockStored, Event, EventBatch
from tests.core.driver import Driver, make_sequence
from tests.core.test_kv_cache_machine import KVCacheMachine, run_machine
from tests.events.subscriber import Router, Stored, decode

ALICE = encode_namespace(tenant="alice")
SALTED = encode_namespace(tenant="alice", salt="pepper-and-salt")


def follow(driver: Driver, **options: Any) -> CacheEvents:
    cache = driver.cache
    events = CacheEvents(cache.keys, cache.num_blocks, cache.block_size, medium="CPU", **options)
    cache.add_observer(events)
    return events


def payload_of(events: list[Event]) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, events))


def names_in(driver: Driver) -> dict[bytes, list[int]]:
    """The name and the tokens of each full block of the tree, from what the tree holds there alone."""
    size = driver.block_size
    blocks: dict[bytes, list[int]] = {}
    for entry in driver.entries():
        own = [namespace for namespace in entry.namespaces if not is_public(namespace)]
        public = [namespace for namespace in entry.namespaces if is_public(namespace)]
        sequence = make_sequence(entry.token_ids)
        sequence.request.path = CachePath(own[0] if own else b"", public[0] if public else None, len(public))
        for index in range(len(entry.token_ids) // size):
            name = driver.cache.keys.name_of(sequence, index)[OWNER_BYTES:]
            blocks[name] = list(entry.token_ids[index * size : (index + 1) * size])
    return blocks


class FollowedMachine(KVCacheMachine):
    """A router that is told nothing but events knows what is cached, whatever happens."""

    @invariant()
    def the_router_knows_what_is_cached(self) -> None:
        if not hasattr(self, "router"):
            # Before any rule but the one that creates the cache.
            self.router = Router()
            self.events = follow(self.driver, with_token_ids=True)
        events = self.events.take()
        if events:
            self.router.read(payload_of(events))
        blocks = names_in(self.driver)
        assert self.router.parents.keys() == blocks.keys()
        assert self.router.token_ids == blocks


def test_events_rebuild_what_is_cached_in_random_programs() -> None:
    run_machine(FollowedMachine, num_programs=60, num_steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_events_rebuild_what_is_cached_in_many_long_random_programs() -> None:
    run_machine(FollowedMachine, num_programs=200, num_steps=100)


def test_the_first_event_forgets_an_earlier_engine() -> None:
    assert follow(Driver(num_blocks=8, block_size=2)).take() == [AllBlocksCleared()]


def test_a_reset_of_all_clears_and_one_that_leaves_blocks_removes() -> None:
    driver = Driver(num_blocks=16, block_size=2)
    events = follow(driver)
    driver.run([1, 2, 3, 4, 5], namespace=ALICE)
    driver.run([6, 7, 8, 9, 10])
    events.take()
    driver.cache.reset("alice")
    (removed,) = map(type, events.take())
    assert removed is not AllBlocksCleared
    running = driver.start([6, 7, 8, 9, 11])
    driver.run([1, 2, 3])
    events.take()
    driver.cache.reset()
    assert AllBlocksCleared() not in events.take()
    driver.finish(running)
    events.take()
    driver.cache.reset()
    assert events.take() == [AllBlocksCleared()]


def test_a_tail_is_not_told_of() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    events = follow(driver)
    events.take()
    driver.run([1, 2, 3])
    driver.evict(1)
    driver.run([1, 2, 3], generated=[4, 5])
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 1


def test_an_event_has_the_fields_that_routers_read() -> None:
    driver = Driver(num_blocks=16, block_size=2)
    events = follow(driver, with_token_ids=True)
    driver.run([1, 2, 3, 4, 5])
    driver.run([1, 2, 3, 4, 5, 6, 7])
    _, first, second = decode(payload_of(events.take())).events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert first.token_ids == [1, 2, 3, 4]
    assert (first.parent_block_hash, second.parent_block_hash) == (None, first.block_hashes[-1])
    assert second.token_ids == [5, 6]
    for event in (first, second):
        assert (event.block_size, event.lora_id, event.medium, event.lora_name) == (2, None, "CPU", None)


def test_the_names_of_what_a_sequence_begins_with_are_not_hashed_again() -> None:
    driver = Driver(num_blocks=16, block_size=2)
    follow(driver)
    first = driver.start([1, 2, 3, 4, 5])
    second = make_sequence([1, 2, 3, 4, 6, 7])
    assert driver.admit(second, 2)
    assert len(second.names) == 2
    assert second.names == first.names


def test_token_ids_tenants_and_salts_stay_in_the_server_by_default() -> None:
    prompt = [70_001, 70_002, 70_003, 70_004, 70_005, 70_006]
    driver = Driver(num_blocks=8, block_size=2, public_prefixes=[[70_001, 70_002]])
    events = follow(driver)
    for namespace in (b"", ALICE, SALTED):
        driver.run(prompt, namespace=namespace)
    driver.evict(8)
    told = payload_of(events.take())
    assert len(decode(told).events) > 4
    for secret in (b"alice", b"pepper", b"salt"):
        assert secret not in told
    for token_id in prompt:
        assert array("i", [token_id]).tobytes()[:3] not in told
        assert msgspec.msgpack.encode(token_id) not in told


def test_equal_prompts_of_two_tenants_have_no_name_in_common() -> None:
    driver = Driver(num_blocks=32, block_size=2)
    events = follow(driver)
    for namespace in (b"", ALICE, SALTED):
        driver.run([1, 2, 3, 4, 5], namespace=namespace)
    names = [name for event in events.take() if isinstance(event, BlockStored) for name in event.block_hashes]
    assert len(names) == len(set(names)) == 6

"""Pins on the cache alone: what they cover, how they end, and what they cost."""

import gc
import tracemalloc
from typing import get_args

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.namespace import encode_namespace
from radixserve.core.pin import Pin
from radixserve.core.sequence import Sequence
from radixserve.errors import PinBudgetExceeded
from radixserve.protocol import PinAt
from tests.clock import FakeClock
from tests.core.driver import Driver, make_sequence

EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
TENANT_A, TENANT_B = encode_namespace(tenant="a"), encode_namespace(tenant="b")


def start_pinned(
    driver: Driver, token_ids: list[int], *pins: PinAt, namespace: bytes = b"", generated: list[int] | None = None
) -> Sequence:
    """Compute a prompt with pins, and leave its sequence running."""
    sequence = make_sequence(token_ids, namespace)
    driver.cache.pins.reserve(sequence, list(pins))
    assert driver.admit(sequence, len(token_ids))
    driver.compute(sequence)
    driver.generate(sequence, generated or [])
    return sequence


def pinned(driver: Driver, token_ids: list[int], *pins: PinAt, namespace: bytes = b"") -> None:
    """Serve a prompt with pins."""
    driver.finish(start_pinned(driver, token_ids, *pins, namespace=namespace))


def evict_all(driver: Driver) -> None:
    cache = driver.cache.stats()
    driver.evict(cache.num_cached_blocks - cache.num_pinned_blocks)


def show(driver: Driver, tenant: str | None = None) -> list[tuple[str, int, int]]:
    return [(pin.pin_id, pin.num_tokens, pin.num_blocks) for pin in driver.cache.pins.show(tenant).pins]


def test_a_pin_covers_the_path_above_it_and_its_tail_once_the_sequence_has_ended() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    sequence = start_pinned(driver, list(range(10)), PinAt("p", 10, 60.0), generated=[1, 2])
    assert show(driver) == [("p", 10, 2)]
    driver.finish(sequence)
    assert show(driver) == [("p", 10, 3)]
    evict_all(driver)
    assert driver.num_cached([*range(10), 99]) == 10
    assert driver.cache.stats().num_cached_blocks == driver.cache.stats().num_pinned_blocks == 3


def test_blocks_of_a_prompt_behind_its_pin_are_evicted() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    pinned(driver, list(range(16)), PinAt("p", 6, 60.0))
    evict_all(driver)
    assert driver.num_cached([*range(16), 99]) == 8
    assert driver.num_cached([*range(6), 99]) == 6


def test_a_pinned_tail_is_copied_and_never_taken_over() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    pinned(driver, list(range(6)), PinAt("p", 6, 60.0))
    longer = driver.start([*range(6), 50])
    assert driver.num_copies == 1
    assert driver.num_cached([*range(6), 60]) == 6
    driver.finish(longer)


def test_a_pin_goes_over_to_the_longer_entry_that_covers_its_tail() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    pinned(driver, list(range(6)), PinAt("p", 6, 60.0))
    driver.run([*range(6), 50])
    assert show(driver) == [("p", 6, 2)]
    driver.run([*range(6), 50, 51, 52])
    assert show(driver) == [("p", 6, 2)]
    evict_all(driver)
    assert driver.num_cached([*range(6), 60]) == 6
    assert driver.cache.stats().num_cached_blocks == 2


def test_a_sequence_that_switches_to_the_blocks_of_another_keeps_its_pin() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    first, second = make_sequence(range(8)), make_sequence(range(8))
    driver.cache.pins.reserve(second, [PinAt("p", 8, 60.0)])
    assert driver.admit(first, 8)
    assert driver.admit(second, 8)
    driver.execute([(first, 8), (second, 8)])
    driver.end_step()
    driver.finish(second)
    driver.finish(first)
    evict_all(driver)
    assert driver.num_cached([*range(8), 99]) == 8


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_an_expired_pin_leaves_blocks_that_are_evicted_and_known_to_have_expired(
    eviction_policy: EvictionPolicy,
) -> None:
    clock = FakeClock()
    driver = Driver(8, 4, max_pinned_share=1.0, clock=clock, eviction_policy=eviction_policy)
    pinned(driver, list(range(10)), PinAt("p", 10, 60.0))
    block_ids = [block_id for entry in driver.entries() for block_id in entry.own_block_ids]
    clock.seconds += 59.0
    driver.cache.pins.expire()
    assert driver.cache.pins.seconds_until_expiry() == 1.0
    assert not any(map(driver.cache.pins.was_expired, block_ids))
    clock.seconds += 1.0
    assert driver.cache.pins.seconds_until_expiry() == 0
    driver.cache.pins.expire()
    assert driver.cache.pins.seconds_until_expiry() is None
    assert all(map(driver.cache.pins.was_expired, block_ids))
    assert not any(map(driver.cache.pins.was_broken, block_ids))
    assert driver.num_cached([*range(10), 99]) == 10
    evict_all(driver)
    assert driver.num_cached([*range(10), 99]) == 0
    driver.run([*range(20, 50)])
    assert not any(map(driver.cache.pins.was_expired, range(8)))


def test_pins_of_the_same_prefix_are_one_that_lasts_as_long_as_the_last_of_them() -> None:
    clock = FakeClock()
    driver = Driver(8, 4, max_pinned_share=0.25, clock=clock)
    pinned(driver, list(range(8)), PinAt("long", 8, 600.0))
    pinned(driver, [*range(8), 9], PinAt("short", 8, 5.0))
    assert show(driver) == [("long", 8, 2), ("short", 8, 2)]
    clock.seconds += 300.0
    driver.cache.pins.expire()
    assert not driver.cache.pins.unpin("short", None)
    pinned(driver, list(range(8)), PinAt("later", 8, 600.0))
    clock.seconds += 500.0
    driver.cache.pins.expire()
    assert show(driver) == [("later", 8, 2)]
    clock.seconds += 101.0
    driver.cache.pins.expire()
    assert show(driver) == []


def test_who_gives_up_a_pin_leaves_those_of_others_of_the_same_prefix() -> None:
    clock = FakeClock()
    driver = Driver(8, 4, clock=clock)
    for pin_id, ttl in (("first", 50.0), ("second", 100.0), ("third", 10.0)):
        pinned(driver, list(range(8)), PinAt(pin_id, 8, ttl))
    assert driver.cache.pins.unpin("second", None)
    assert show(driver) == [("first", 8, 2), ("third", 8, 2)]
    clock.seconds += 49.0
    driver.cache.pins.expire()
    evict_all(driver)
    assert driver.num_cached([*range(8), 99]) == 8
    assert driver.cache.pins.seconds_until_expiry() == 1.0
    clock.seconds += 1.0
    driver.cache.pins.expire()
    assert (show(driver), driver.cache.stats().num_pinned_blocks) == ([], 0)


def test_a_pin_ends_with_its_last_owner_whatever_others_had_before() -> None:
    clock = FakeClock()
    driver = Driver(8, 4, clock=clock)
    pinned(driver, list(range(8)), PinAt("over", 8, 5.0))
    pinned(driver, list(range(8)), PinAt("owner", 8, 50.0))
    clock.seconds += 10.0
    assert driver.cache.pins.unpin("owner", None)
    assert (show(driver), driver.cache.stats().num_pinned_blocks) == ([], 0)


def test_ids_of_a_pin_that_is_refreshed_for_ever_are_forgotten_those_whose_time_is_over_first() -> None:
    clock = FakeClock()
    driver = Driver(8, 4, max_pinned_share=1.0, clock=clock)
    pinned(driver, list(range(8)), PinAt("explicit", 8, 3600.0))
    for index in range(200):
        clock.seconds += 1.0
        pinned(driver, list(range(8)), PinAt(f"implicit{index}", 8, 300.0))
    assert not driver.cache.pins.unpin("implicit0", None)
    assert driver.cache.pins.unpin("explicit", None)


def test_equal_prefixes_of_two_tenants_are_pins_of_their_own() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0, public_prefixes=[[*range(8)]])
    pinned(driver, list(range(12)), PinAt("a", 8, 60.0), namespace=TENANT_A)
    pinned(driver, list(range(12)), PinAt("b", 8, 60.0), namespace=TENANT_B)
    assert driver.cache.stats().num_pinned_blocks == 2
    assert not driver.cache.pins.unpin("a", "b")
    assert driver.cache.pins.unpin("a", "a")
    evict_all(driver)
    assert driver.num_cached([*range(8), 99], TENANT_A) == 8
    assert (show(driver, "a"), show(driver, "b")) == ([], [("b", 8, 2)])


def test_the_budget_counts_each_block_once_from_when_its_request_is_added() -> None:
    driver = Driver(16, 4, max_pinned_share=0.25)
    requests = [make_sequence([*range(12), last]) for last in (20, 21, 22)]
    for index, sequence in enumerate(requests):
        driver.cache.pins.reserve(sequence, [PinAt(f"8-{index}", 8, 60.0), PinAt(f"12-{index}", 12, 60.0)])
    other = make_sequence([50] * 8)
    with pytest.raises(PinBudgetExceeded, match="needs 2 more K/V blocks, and pins may keep 4 of 16"):
        driver.cache.pins.reserve(other, [PinAt("other", 8, 60.0)])
    assert not other.request.pins
    for sequence in requests:
        driver.cache.pins.forget(sequence.request)
    driver.cache.pins.reserve(other, [PinAt("other", 8, 60.0)])


def test_a_refusal_names_the_callers_own_pins_and_of_others_only_how_many_blocks_they_hold() -> None:
    driver = Driver(16, 4, max_pinned_share=0.25)
    pinned(driver, list(range(4)), PinAt("mine", 4, 90.5), namespace=TENANT_A)
    pinned(driver, list(range(8)), PinAt("secret", 8, 60.0), namespace=TENANT_B)
    with pytest.raises(PinBudgetExceeded) as refusal:
        driver.cache.pins.reserve(make_sequence(range(30, 38), TENANT_A), [PinAt("new", 8, 60.0)])
    assert "your pins mine (1 block, 91 s left); 2 blocks of others" in refusal.value.message
    assert "secret" not in refusal.value.message
    assert driver.cache.pins.show("a").num_other_blocks == 2
    assert driver.cache.pins.show(None).num_other_blocks == 0


def test_a_pin_alone_is_told_as_it_is_among_all_and_to_no_other_tenant() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    pinned(driver, list(range(6)), PinAt("mine", 6, 90.0), namespace=TENANT_A)
    pinned(driver, list(range(6)), PinAt("again", 6, 30.0), namespace=TENANT_A)
    pinned(driver, list(range(8)), PinAt("secret", 8, 60.0), namespace=TENANT_B)
    pins = driver.cache.pins
    for tenant in ("a", "b", None):
        listed = {pin.pin_id: pin for pin in pins.show(tenant).pins}
        for pin_id in ("mine", "again", "secret", "never"):
            assert pins.show_one(pin_id, tenant).pins == [pin for other, pin in listed.items() if other == pin_id]
    alone = pins.show_one("mine", "a")
    assert (alone.max_blocks, alone.num_other_blocks) == (16, 2)


def test_a_request_that_is_alone_breaks_as_few_pins_as_it_needs_those_that_end_first() -> None:
    driver = Driver(12, 4, max_pinned_share=1.0)
    for pin_id, start, num_blocks, ttl in (("a", 20, 1, 10.0), ("b", 40, 3, 20.0), ("c", 60, 3, 30.0)):
        pinned(driver, list(range(start, start + 4 * num_blocks)), PinAt(pin_id, 4 * num_blocks, ttl))
    alone = make_sequence(range(100, 132))
    match = driver.cache.match(alone)
    assert not driver.admit(alone, 32, match)
    assert driver.cache.break_pins(alone, 32, match)
    assert [pin_id for pin_id, _, _ in show(driver)] == ["a", "c"]
    assert driver.cache.stats().num_broken_pins == 1
    broken = [block_id for block_id in range(12) if driver.cache.pins.was_broken(block_id)]
    assert len(broken) == 3
    assert driver.admit(alone, 32, match)
    driver.compute(alone)
    driver.finish(alone)
    assert driver.num_cached([*range(60, 72), 1]) == 12
    assert driver.num_cached([*range(40, 52), 1]) < 12


def test_no_pin_is_broken_for_what_would_not_fit_without_pins_either() -> None:
    driver = Driver(4, 4, max_pinned_share=1.0)
    pinned(driver, list(range(8)), PinAt("p", 8, 60.0))
    running = driver.start(range(50, 54))
    too_long = make_sequence(range(100, 116))
    assert not driver.cache.break_pins(too_long, 16, driver.cache.match(too_long))
    assert show(driver) == [("p", 8, 2)]
    driver.finish(running)


def test_a_request_is_not_served_at_the_cost_of_the_pins_on_what_it_hits() -> None:
    driver = Driver(6, 4, max_pinned_share=1.0)
    pinned(driver, list(range(12)), PinAt("hit", 12, 10.0))
    pinned(driver, list(range(50, 58)), PinAt("other", 8, 60.0))
    alone = make_sequence(range(20))
    match = driver.cache.match(alone)
    assert not driver.admit(alone, 8, match)
    assert driver.cache.break_pins(alone, 8, match)
    assert [pin_id for pin_id, _, _ in show(driver)] == ["hit"]


def test_a_reset_ends_the_pins_of_its_tenant_and_drops_their_blocks() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    pinned(driver, list(range(8)), PinAt("a", 8, 60.0), namespace=TENANT_A)
    pinned(driver, list(range(8)), PinAt("b", 8, 60.0), namespace=TENANT_B)
    assert driver.cache.reset("a") == (2, 0)
    assert [pin_id for pin_id, _, _ in show(driver)] == ["b"]
    assert driver.cache.reset() == (2, 0)
    assert driver.cache.stats().num_pinned_blocks == 0
    assert driver.cache.stats().num_free_blocks == 16


def test_pins_that_end_before_their_time_leave_nothing_behind() -> None:
    driver = Driver(16, 4, max_pinned_share=1.0)
    num_before = num_pins_alive()
    for number in range(1000):
        pinned(driver, list(range(10)), PinAt(str(number), 10, 3600.0))
        assert driver.cache.pins.unpin(str(number), None)
    assert num_pins_alive() - num_before < 100


def num_pins_alive() -> int:
    """Those of other tests too, as far as nothing has collected them."""
    gc.collect()
    return sum(type(thing) is Pin for thing in gc.get_objects())


def test_pins_of_one_talk_share_the_names_of_its_blocks() -> None:
    """Else each turn of a long talk that is pinned would take as much memory as the talk's K/V have names."""
    num_blocks = 1000
    driver = Driver(num_blocks + 8, 4, max_pinned_share=1.0)
    pinned(driver, list(range(4 * num_blocks)), PinAt("first", 4 * num_blocks, 60.0))
    sequence = driver.start(list(range(4 * num_blocks)))
    gc.collect()
    tracemalloc.start()
    for number in range(50):
        sequence.names.clear()  # each turn is another request
        driver.cache.pins.reserve(sequence, [PinAt(str(number), 4 * num_blocks - 4 * number - 4, 60.0)])
    sequence.names.clear()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 50 * num_blocks * 16

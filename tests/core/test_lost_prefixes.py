"""What is remembered of evicted and reset blocks, checked against a shadow that remembers everything."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixserve.core.namespace import encode_namespace, tenant_of
from radixserve.protocol import LostPrefix
from tests.clock import FakeClock
from tests.core.driver import Driver, Prefix, make_sequence
from tests.core.test_explain_facts import facts_of

NAMESPACES = [b"", encode_namespace(tenant="a"), encode_namespace(tenant="a", salt="s"), encode_namespace(tenant="b")]


def lost_of(driver: Driver, prompt: list[int], namespace: bytes = b"") -> LostPrefix | None:
    return facts_of(driver, prompt, namespace).lost


def test_an_evicted_prefix_is_told_with_its_age_and_how_long_it_was_idle() -> None:
    clock = FakeClock(0.0)
    driver = Driver(num_blocks=8, block_size=4, clock=clock)
    prompt = list(range(18))
    driver.run(prompt)
    clock.seconds = 30.0
    driver.evict(driver.cache.stats().num_cached_blocks)
    clock.seconds = 100.0
    assert lost_of(driver, [*prompt, 50, 51]) == LostPrefix(16, "evicted", 70.0, 30.0)


def test_what_was_never_cached_is_not_lost() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.run(list(range(18)))
    assert lost_of(driver, [*range(16), 50, 51, 52, 53]) is None
    driver.evict(driver.cache.stats().num_cached_blocks)
    assert lost_of(driver, [9, *range(1, 18)]) is None
    assert lost_of(driver, list(range(18)), NAMESPACES[1]) is None


def test_a_prompt_that_leaves_a_lost_one_has_lost_as_much_as_it_shares() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.run(list(range(18)))
    driver.evict(driver.cache.stats().num_cached_blocks)
    lost = lost_of(driver, [*range(9), 50, 51, 52, 53, 54])
    assert lost is not None
    assert lost.num_tokens == 8


@pytest.mark.parametrize("num_at_once", [1, 3, 8])
def test_a_loss_counts_from_a_hit_inside_a_block(num_at_once: int) -> None:
    driver = Driver(num_blocks=10, block_size=4, eviction_policy="lru")
    prompt = list(range(22))
    driver.run(prompt)
    driver.run([*range(7), 50, 51])
    while driver.num_cached(prompt) > 7:
        driver.evict(num_at_once)
        driver.run([*range(7), 50, 51])
    facts = facts_of(driver, prompt)
    assert facts.num_hit_tokens == 7
    assert facts.lost is not None
    assert facts.lost.num_tokens == 20 - 7


def test_what_is_computed_again_is_no_longer_lost() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    prompt = list(range(18))
    driver.run(prompt)
    driver.evict(driver.cache.stats().num_cached_blocks)
    driver.run(prompt[:9])
    facts = facts_of(driver, prompt)
    assert (facts.num_hit_tokens, facts.lost and facts.lost.num_tokens) == (9, 7)
    driver.run(prompt)
    assert driver.cache.lost.num_blocks == 0


def test_a_reset_is_told_as_one() -> None:
    driver = Driver(num_blocks=8, block_size=4)
    driver.run(list(range(9)))
    driver.cache.reset()
    lost = lost_of(driver, list(range(9)))
    assert lost is not None
    assert (lost.num_tokens, lost.reason) == (8, "reset")


def test_the_reason_is_that_of_the_first_block_lost_and_all_behind_it_counts() -> None:
    driver = Driver(num_blocks=8, block_size=4, clock=FakeClock(), eviction_policy="lru")
    driver.run(list(range(18)))
    driver.evict(3)
    driver.cache.reset()
    assert lost_of(driver, list(range(18))) == LostPrefix(16, "reset", 0.0, 0.0)
    driver.run(list(range(9)))
    assert lost_of(driver, list(range(18))) == LostPrefix(7, "evicted", 0.0, 0.0)


def test_what_goes_block_by_block_is_one_piece() -> None:
    driver = Driver(num_blocks=40, block_size=4, clock=FakeClock())
    driver.run(list(range(130)))
    while driver.cache.stats().num_cached_blocks:
        driver.evict(1)
    lost = lost_of(driver, list(range(130)))
    assert lost is not None
    assert lost.num_tokens == 128
    assert (driver.cache.lost.num_pieces, driver.cache.lost.num_blocks) == (1, 32)


def test_only_so_much_is_remembered_and_the_oldest_goes_first() -> None:
    driver = Driver(num_blocks=3, block_size=4, max_lost_blocks=64)
    prompts = [list(range(start, start + 9)) for start in range(0, 1000, 8)]
    for prompt in prompts:
        driver.run(prompt)
        assert driver.cache.lost.num_pieces <= 4
    driver.cache.reset()
    assert [prompt for prompt in prompts if lost_of(driver, prompt)] == prompts[-4:]
    driver = Driver(num_blocks=40, block_size=1, max_lost_blocks=64)
    for start in range(0, 1000, 30):
        driver.run(list(range(start, start + 30)))
        assert driver.cache.lost.num_blocks <= 64


class Shadow:
    """Remembers every block that the tree has forgotten: how it went and when."""

    def __init__(self, driver: Driver, clock: FakeClock) -> None:
        self.driver = driver
        self.clock = clock
        self.cached: set[Prefix] = set()
        self.lost: dict[Prefix, tuple[str, float]] = {}

    def look(self, reason: str) -> None:
        now = {prefix for prefix in self.driver.findable().values() if len(prefix[1]) % self.driver.block_size == 0}
        for prefix in self.cached - now:
            self.lost[prefix] = (reason, self.clock.seconds)
        for prefix in now:
            self.lost.pop(prefix, None)
        self.cached = now

    def check(self, prompt: list[int], namespace: bytes) -> None:
        size = self.driver.block_size
        facts = facts_of(self.driver, prompt, namespace)
        namespaces = self.driver.namespaces_of(make_sequence(prompt, namespace))
        first = index = facts.num_hit_tokens // size
        while (index + 1) * size <= len(prompt) and self._prefix(prompt, namespaces, index) in self.lost:
            index += 1
        if index == first:
            assert facts.lost is None
            return
        reason, lost_at = self.lost[self._prefix(prompt, namespaces, first)]
        assert facts.lost is not None
        assert facts.lost.num_tokens == index * size - facts.num_hit_tokens
        assert facts.lost.reason == reason
        assert 0 <= self.clock.seconds - lost_at - facts.lost.seconds_ago <= 1
        assert facts.lost.idle_seconds >= 0

    def _prefix(self, prompt: list[int], namespaces: list[bytes], index: int) -> Prefix:
        return namespaces[index], tuple(prompt[: (index + 1) * self.driver.block_size])


@pytest.mark.parametrize("eviction_policy", ["lru", "learned-reuse"])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(6, 30),
    block_size=st.sampled_from([1, 2, 4]),
    is_public=st.booleans(),
)
def test_random_programs_lose_what_a_full_memory_knows(
    eviction_policy: str, seed: int, num_blocks: int, block_size: int, is_public: bool
) -> None:
    rng = random.Random(seed)
    clock = FakeClock()
    public = [[rng.randrange(2) for _ in range(2 * block_size)]] if is_public else []
    driver = Driver(num_blocks, block_size, clock=clock, eviction_policy=eviction_policy, public_prefixes=public)
    shadow = Shadow(driver, clock)
    prompts: list[list[int]] = [[], *public]
    for _ in range(25):
        clock.seconds += rng.choice([0.0, 0.25, 5.0])
        before = rng.choice(prompts)
        prompt = before[: rng.randrange(len(before) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        prompt = prompt[: (num_blocks - 1) * block_size]
        prompts.append(prompt)
        namespace = rng.choice(NAMESPACES)
        if rng.random() < 0.1:
            driver.cache.reset(tenant_of(namespace))
            shadow.look("reset")
        else:
            driver.run(prompt, namespace=namespace, chunk=rng.choice([None, 3]))
            shadow.look("evicted")
        for asked in rng.sample(prompts, min(len(prompts), 4)):
            shadow.check([*asked, 0], rng.choice(NAMESPACES))

"""Laws of the learned order of eviction."""

import pickle
import random
from collections.abc import Iterable, Iterator
from itertools import count
from typing import get_args

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.eviction import learned_reuse
from radixserve.core.eviction.answer import Answer
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.namespace import encode_namespace
from radixserve.core.sequence import Sequence
from tests.core.driver import Driver, make_sequence
from tests.core.eviction.reference import Path, Reference, ReferenceUse

EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)


def begin(cache: KVCache, prompt: Path, namespace: bytes = b"") -> Sequence:
    """Start a request and compute its prompt."""
    sequence = make_sequence(prompt, namespace)
    match = cache.match(sequence)
    assert cache.allocate(sequence, len(prompt) - match.num_tokens, match)
    sequence.num_computed_tokens = len(prompt)
    cache.commit(sequence)
    cache.take_copies()
    cache.end_step()
    return sequence


def cached_paths(cache: KVCache) -> set[Path]:
    """The path of each cached block, which are of one token."""
    paths: set[Path] = set()
    path: Path = ()
    for run in cache.walk():
        path = path[: run.num_tokens_above]
        for token_id in run.token_ids:
            path = (*path, token_id)
            paths.add(path)
    return paths


def agent_prompts(rng: random.Random, num_requests: int) -> list[Path]:
    """Conversations that grow at different paces, some of which branch, with common beginnings, and single requests."""
    conversations: list[Path] = [(0, 1, 2, 10 + number) for number in range(4)]
    prompts = []
    for number in range(num_requests):
        if rng.random() < 0.2:
            prompts.append((rng.choice([0, 5]), 1, 1000 + number, number))
            continue
        index = min(int(rng.expovariate(0.9)), len(conversations) - 1)
        conversation = conversations[index]
        if rng.random() < 0.15:
            conversation = conversation[: rng.randint(1, len(conversation))]
        if len(conversation) > 25:
            conversation = (0, 1, 2)
        conversations[index] = (*conversation, *(rng.randrange(100, 200) for _ in range(rng.randint(1, 4))))
        prompts.append(conversations[index])
    return prompts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [40, 70])
def test_each_eviction_takes_what_the_rule_says_block_by_block(num_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = KVCache(num_blocks, 1, CacheSettings(eviction_policy="learned-reuse"))
    reference = Reference(num_blocks)
    running: list[tuple[Sequence, ReferenceUse, Path]] = []
    untold: list[tuple[Sequence, ReferenceUse]] = []
    num_evicted = 0
    for prompt in agent_prompts(rng, 150):
        before = cached_paths(cache)
        sequence = begin(cache, prompt)
        use, evicted = reference.start(prompt)
        num_evicted += len(evicted)
        assert before - cached_paths(cache) == set(evicted) - cached_paths(cache)
        assert cached_paths(cache) == {path for path, block in reference.blocks.items() if block.is_cached}
        running.append((sequence, use, prompt))
        untold.append((sequence, use))
        while running and (rng.random() < 0.6 or sum(len(path) for *_, path in running) > num_blocks - 30):
            sequence, use, path = running.pop(rng.randrange(len(running)))
            cache.release(sequence)
            reference.release(path)
        while untold and rng.random() < 0.5:
            sequence, use = untold.pop(rng.randrange(len(untold)))
            answer = Answer(rng.choice([True, True, False, None]), rng.choice([5, 70, 600]))
            cache.record_answer(sequence, answer)
            reference.record_answer(use, answer)
    assert num_evicted > 300


def num_hits(eviction_policy: EvictionPolicy, num_blocks: int, requests: Iterable[tuple[Path, Answer]]) -> int:
    """Serve requests one at a time, and return how many tokens were found."""
    cache = KVCache(num_blocks, 1, CacheSettings(eviction_policy=eviction_policy))
    hits = 0
    for prompt, answer in requests:
        match = cache.match(make_sequence(prompt))
        hits += match.num_tokens
        sequence = begin(cache, prompt)
        cache.record_answer(sequence, answer)
        cache.release(sequence)
    return hits


TOOL, FINAL = Answer(calls_tool=True, num_tokens=50), Answer(calls_tool=False, num_tokens=300)


def agents(rng: random.Random, num_agents: int, num_requests: int) -> Iterator[tuple[Path, Answer]]:
    """Agents that call tools in quick turns, and then answer and are gone for good."""
    names = count(1)
    live = [[next(names)] for _ in range(num_agents)]
    for _ in range(num_requests):
        history = rng.choice(live)
        history += [rng.randrange(100_000) for _ in range(4)]
        is_over = len(history) > 40
        yield tuple(history), FINAL if is_over else TOOL
        if is_over:
            live.remove(history)
            live.append([next(names)])


@pytest.mark.parametrize("num_blocks", [80, 110, 140])
def test_more_of_agents_with_short_memory_is_found_than_by_lru(num_blocks: int) -> None:
    requests = list(agents(random.Random(0), num_agents=8, num_requests=600))
    learned, lru = (num_hits(policy, num_blocks, requests) for policy in EVICTION_POLICIES)
    assert learned > 1.05 * lru


def test_prompts_that_never_come_again_do_not_flush_what_does() -> None:
    """Eight conversations take turns, and between their turns comes what nobody asks for twice."""

    def requests() -> Iterator[tuple[Path, Answer]]:
        unseen = count(1000)
        for turn in range(400):
            yield tuple(range(turn % 8 * 10, turn % 8 * 10 + 10)), TOOL
            yield tuple(next(unseen) for _ in range(20)), FINAL

    assert num_hits("lru", 150, requests()) == 0
    assert num_hits("learned-reuse", 150, requests()) > 0.7 * 400 * 9


def test_what_its_follower_was_used_for_does_not_make_a_block_go_before_it() -> None:
    """A head that was always used at long gaps is worth less than what follows it, and must stay for it."""
    rng = random.Random(1)
    cache = KVCache(30, 1, CacheSettings(eviction_policy="learned-reuse"))
    for number in range(300):
        branch = number % 2 if number % 50 else 2
        sequence = begin(cache, (7, 7, 7, branch, *(rng.randrange(50) for _ in range(3))))
        cache.record_answer(sequence, TOOL if branch < 2 else FINAL)
        cache.release(sequence)
        paths = cached_paths(cache)
        assert all(path[:-1] in paths for path in paths if len(path) > 1)


def test_uses_again_of_evicted_blocks_are_learned_from() -> None:
    """A loop one block longer than the cache: LRU never hits, and only evicted blocks show that it is a loop."""
    requests = [((number % 11,) * 2, TOOL) for number in range(400)]
    assert num_hits("lru", 20, requests) == 0
    assert num_hits("learned-reuse", 20, requests) > 200


def test_a_preempted_request_that_finds_its_own_blocks_teaches_nothing() -> None:
    caches = [KVCache(12, 1, CacheSettings(eviction_policy="learned-reuse")) for _ in range(2)]
    for number in range(60):
        for cache, num_preemptions in zip(caches, (0, 3), strict=True):
            # The last token is not computed before it is preempted, so that it needs no block twice.
            prompt = tuple(range(number % 5 * 10, number % 5 * 10 + 3))
            sequence = begin(cache, prompt)
            for _ in range(num_preemptions):
                sequence.token_ids.append(0)
                cache.release(sequence)
                match = cache.match(sequence)
                assert match.num_tokens == 3
                assert cache.allocate(sequence, 0, match)
                sequence.token_ids.pop()
            cache.record_answer(sequence, TOOL)
            cache.release(sequence)
        assert cached_paths(caches[0]) == cached_paths(caches[1])


@pytest.mark.parametrize("num_tenants", [1, 400])
def test_what_is_remembered_is_bounded(num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_reuse, "MAX_GONE_BLOCKS", 500)
    monkeypatch.setattr(learned_reuse, "MAX_GHOSTS", 50)
    monkeypatch.setattr(learned_reuse, "MAX_TENANTS", 5)
    cache = KVCache(50, 1, CacheSettings(eviction_policy="learned-reuse", max_lost_blocks=0))
    rng = random.Random(0)
    unseen = count(1000)
    sizes = []
    for number in range(1500):
        prompt = (number % 5, rng.randrange(5), *(next(unseen) for _ in range(rng.randint(1, 20))))
        sequence = begin(cache, prompt, encode_namespace(tenant=str(number % num_tenants)))
        cache.record_answer(sequence, Answer(rng.choice([True, False, None]), rng.choice([1, 100, 300, 1000, 3000])))
        cache.release(sequence)
        if number >= 500 and number % 20 == 0:
            sizes.append(len(pickle.dumps(cache)))
    assert max(sizes[25:]) < 1.25 * max(sizes[:25])


def test_a_reset_leaves_nothing_of_runs_that_two_requests_were_the_last_to_use_in_part() -> None:
    driver = Driver(num_blocks=8, block_size=1)
    sizes = []
    for _ in range(600):
        driver.run((0, 1, 2, 3, 4, 5))
        # A hit inside a run does not split it.
        driver.run((0, 1, 2))
        assert driver.cache.reset() == (6, 0)
        sizes.append(len(pickle.dumps(driver.cache)))
    assert max(sizes[300:]) < 1.1 * max(sizes[:300])


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_how_far_another_tenant_follows_a_longer_public_prefix_makes_no_difference(seed: int) -> None:
    """What it has behind the prefix that its prompts begin with is its own, and so must be what it teaches."""
    short, long = (1, 2), (1, 2, 3, 4, 5, 6)
    tenant, other = (encode_namespace(tenant=name) for name in ("a", "b"))

    def play(other_tokens: dict[int, int]) -> list[set[tuple[bytes, bytes]]]:
        rng = random.Random(seed)
        cache = KVCache(12, 1, CacheSettings(eviction_policy="learned-reuse", public_prefixes=[short, long]))
        seen = []
        for _ in range(150):
            who = rng.random()
            rest = tuple(rng.choices(range(10, 13), k=rng.randint(1, 4)))
            followed = tuple(other_tokens.get(token_id, token_id) for token_id in long[2 : 2 + rng.randint(1, 3)])
            prompt = (long if who < 0.4 else short if who < 0.7 else short + followed) + rest
            sequence = begin(cache, prompt, tenant if who < 0.7 else other)
            cache.record_answer(sequence, rng.choice([TOOL, FINAL]))
            cache.release(sequence)
            # What a tenant can find of public prefixes and of its own.
            seen.append({(run.namespace, run.token_ids.tobytes()) for run in cache.walk() if run.namespace != other})
        return seen

    assert play({}) == play({3: 103, 4: 104, 5: 105})

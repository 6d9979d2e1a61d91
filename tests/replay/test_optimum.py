import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations

import pytest

from radixserve.config import EvictionPolicy
from radixserve.replay.optimum import look_ahead, optimum
from radixserve.replay.replay import POLICIES, replay
from radixserve.replay.trace import Trace
from tests.replay.traces import random_prompts, trace_of

Node = tuple[bytes | int, ...]


def paths_of(trace: Trace) -> list[frozenset[Node]]:
    """The nodes of each request: its namespace with every prefix of its ids."""
    return [
        frozenset((request.namespace, *request.ids[:length]) for length in range(1, len(request.ids) + 1))
        for request in trace.requests
    ]


def trees(nodes: frozenset[Node], kept: frozenset[Node], capacity: int) -> Iterator[frozenset[Node]]:
    """Every way to evict from nodes that keeps some of them, fits, and leaves no node without those above it."""
    others = nodes - kept
    for count in range(min(len(others), capacity - len(kept)) + 1):
        for chosen in combinations(others, count):
            tree = kept.union(chosen)
            if all(len(node) == 2 or node[:-1] in tree for node in tree):
                yield tree


def most_hits(trace: Trace, capacity: int) -> int:
    """Search all ways to evict, after each request, for the most hits."""
    paths = paths_of(trace)

    @cache
    def search(number: int, cached: frozenset[Node]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        later = max(search(number + 1, tree) for tree in trees(cached | path, path, capacity))
        return len(cached & path) + later

    return search(0, frozenset())


def random_trace(seed: int) -> tuple[Trace, int]:
    source = random.Random(seed)
    prompts = random_prompts(source, count=source.randint(6, 10), max_length=3, num_ids=source.randint(2, 4))
    trace = trace_of(prompts, namespaces=source.choice([1, 1, 2]))
    return trace, trace.max_ids + source.randint(0, 3)


@pytest.mark.parametrize("hundreds", range(10))
def test_the_optimum_is_what_a_search_over_all_evictions_finds(hundreds: int) -> None:
    num_with_losses = 0
    for seed in range(100 * hundreds, 100 * hundreds + 100):
        trace, capacity = random_trace(seed)
        uses = look_ahead(trace)
        best = most_hits(trace, capacity)
        assert sum(optimum(uses, capacity)) == best, f"seed {seed}"
        num_with_losses += best < sum(use.num_known for use in uses)
    assert num_with_losses >= 25


@pytest.mark.parametrize("policy", POLICIES)
def test_no_replay_hits_more_than_the_optimum_and_it_no_more_than_a_cache_without_end(policy: EvictionPolicy) -> None:
    has_gap = False
    for seed in range(50):
        prompts = random_prompts(random.Random(seed), count=60, max_length=12, num_ids=3)
        trace = trace_of(prompts, namespaces=2)
        uses = look_ahead(trace)
        hits, best = sum(replay(trace, 30, policy)), sum(optimum(uses, 30))
        assert hits <= best <= sum(use.num_known for use in uses)
        has_gap |= hits < best
    assert has_gap


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_holds_everything_hits_all_that_was_seen_before(policy: EvictionPolicy) -> None:
    trace = trace_of(random_prompts(random.Random(1), count=60, max_length=12, num_ids=3), namespaces=2)
    uses = look_ahead(trace)
    known = [use.num_known for use in uses]
    assert replay(trace, trace.num_ids, policy) == known
    assert optimum(uses, trace.num_ids) == known


def test_the_optimum_keeps_what_lru_gives_up_in_a_cycle() -> None:
    trace = trace_of([[1], [2], [3]] * 10)
    assert sum(replay(trace, 2, "lru")) == 0
    assert sum(optimum(look_ahead(trace), 2)) == 14


def test_equal_ids_behind_other_ids_or_in_another_namespace_are_other_blocks() -> None:
    trace = trace_of([[1, 2], [2], [2, 2], [1, 2]])
    assert [use.num_known for use in look_ahead(trace)] == [0, 0, 1, 2]
    apart = trace_of([[1, 2], [1, 2], [1, 2]], namespaces=2)
    assert [use.num_known for use in look_ahead(apart)] == [0, 0, 2]

"""What one tenant can see of another: that there is load, and nothing of its prompts."""

import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest

from radixserve.config import EvictionPolicy, SchedulePolicy
from radixserve.core.namespace import encode_namespace
from radixserve.protocol import CacheWasReset, ResetCache, ShowTenant, TenantStats
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
# What every answer is made of: the likeliest token, and the next one for beams.
ANSWER = (5, 6)
A, OTHER = encode_namespace(tenant="a"), encode_namespace(tenant="b")
UNNAMED = encode_namespace()
# The first begins the second.
PUBLIC = [ids(150, 2 * B), ids(150, 4 * B), ids(60, B)]

Rename = Callable[[int], int]


def answer(_: Sequence[int]) -> dict[int, float]:
    return {ANSWER[0]: 0.6, ANSWER[1]: 0.4}


def unchanged(token_id: int) -> int:
    return token_id


def renamed(token_id: int) -> int:
    """Another token for each but those of answers: what overlapped still does, by as much."""
    kept = [other for other in range(200) if other not in ANSWER]
    return token_id if token_id in ANSWER else kept[(kept.index(token_id) + 97) % len(kept)]


class Trace:
    """Requests of two tenants, B's copies of A's that follow at odd times, and all that the engine did."""

    def __init__(
        self,
        harness: Harness,
        rename: Rename,
        *,
        seed: int = 0,
        namespaces: tuple[bytes, bytes] = (A, OTHER),
        max_priority: int = 0,
        public_prefixes: Sequence[list[int]] = (),
    ) -> None:
        self.harness = harness
        self.max_priority = max_priority
        self.rng = random.Random(seed)
        self.rename = rename
        self.namespaces = namespaces
        self.public_prefixes = public_prefixes
        self.of_a: list[str] = []
        self.seen: list[Any] = []
        self._play()

    def _play(self) -> None:
        rng = self.rng
        prefixes = [ids(17 * number, B * rng.randint(1, 4) + rng.randint(0, 5)) for number in range(3)]
        prefixes += self.public_prefixes
        late: list[tuple[list[int], dict[str, Any]]] = []
        for _ in range(30):
            prompt = [*rng.choice(prefixes), *(rng.randrange(200) for _ in range(rng.randint(1, 20)))]
            if rng.random() < 0.4:
                # The next turn of a conversation.
                prefixes.append([*prompt, *[ANSWER[0]] * 4, *ids(rng.randrange(200), 3)])
            num_tokens = rng.randint(1, 100)
            how = rng.choice([{}, {"max_tokens": num_tokens}, {"n": 2, "max_tokens": num_tokens}, {"beam_width": 2}])
            how = how | {"priority": rng.randint(0, self.max_priority)}
            self.of_a.append(self._add(prompt, how, self.namespaces[0]))
            late.append((self._copy(prompt), how))
            while late and rng.random() < 0.5:
                self._add(*late.pop(rng.randrange(len(late))), self.namespaces[1])
            for _ in range(rng.choice([0, 0, 1, 3])):
                self._step()
            if rng.random() < 0.1:
                self.harness.core.abort([rng.choice(self.of_a)])
        while self.harness.core.has_work:
            self._step()

    def _copy(self, prompt: list[int]) -> list[int]:
        """Return a prompt with other names behind the longest public prefix that it begins with."""
        num_kept = max((len(public) for public in self.public_prefixes if prompt[: len(public)] == public), default=0)
        return prompt[:num_kept] + [self.rename(token_id) for token_id in prompt[num_kept:]]

    def _add(self, prompt: list[int], how: dict[str, Any], namespace: bytes) -> str:
        if "beam_width" in how:
            return self.harness.add_beams(prompt, namespace=namespace, **how)
        return self.harness.add(prompt, namespace=namespace, **how)

    def _step(self) -> None:
        """Run a step and note where each row stood and what it computed, and what A got and could ask for."""
        self.harness.step()
        batches = self.harness.executor.batches
        rows = [(row.num_computed_tokens, len(row.token_ids), [*row.block_table]) for row in batches[-1].rows]
        results = [self.harness.results[request_id] for request_id in self.of_a]
        got = [(result.num_cached_tokens, [choice.token_ids[:] for choice in result.answers]) for result in results]
        self.seen.append((rows, batches[-1].copies, got, self.harness.core.control(ShowTenant("a"))))


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
@pytest.mark.parametrize("public_prefixes", [[], PUBLIC], ids=["all tenants' own", "public prefixes"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_tenants_schedule_is_the_same_whether_another_sends_copies_of_its_prompts_or_unrelated_ones(
    make_harness: MakeHarness,
    policy: SchedulePolicy,
    seed: int,
    public_prefixes: list[list[int]],
    eviction_policy: EvictionPolicy,
) -> None:
    def play(rename: Rename) -> Trace:
        harness = make_harness(
            table=answer,
            num_blocks=30,
            schedule_policy=policy,
            eviction_policy=eviction_policy,
            max_model_len=300,
            public_prefixes=public_prefixes,
        )
        max_priority = 2 if policy == "priority" else 0
        return Trace(harness, rename, seed=seed, max_priority=max_priority, public_prefixes=public_prefixes)

    copies, unrelated = play(unchanged), play(renamed)
    assert copies.seen == unrelated.seen
    stats = copies.harness.stats
    assert stats.num_preemptions > 0
    assert stats.cache.num_evicted_tokens > 0
    assert stats.cache.num_hit_tokens > 0


def test_inside_one_namespace_copies_and_unrelated_prompts_would_be_told_apart(make_harness: MakeHarness) -> None:
    copies, unrelated = (
        Trace(make_harness(table=answer, max_model_len=300), rename, namespaces=(A, A))
        for rename in (unchanged, renamed)
    )
    assert copies.seen != unrelated.seen


def stats_of(harness: Harness, tenant: str | None) -> TenantStats:
    stats = harness.core.control(ShowTenant(tenant))
    assert isinstance(stats, TenantStats)
    return stats


def test_the_figures_of_all_tenants_add_up_to_those_of_the_engine_at_every_step(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=24, max_model_len=300)
    rng = random.Random(3)
    namespaces = [A, OTHER, UNNAMED, *(encode_namespace(tenant="a", salt=salt) for salt in ("a", "b"))]
    for number in range(40):
        prompt = ids(rng.randrange(3), rng.randint(1, 5) * B) + ids(50 + number, rng.randint(1, 20))
        namespace = rng.choice(namespaces)
        params = rng.choice([{}, {"n": 3}, {"max_tokens": 60}])
        if rng.random() < 0.2:
            harness.add_beams(prompt, namespace=namespace, beam_width=3)
        else:
            harness.add(prompt, namespace=namespace, **params)
    while harness.core.has_work:
        harness.step()
        total, all_stats = harness.stats, [stats_of(harness, tenant) for tenant in ("a", "b", None)]
        for name in (
            "num_cached_blocks",
            "num_in_use_blocks",
            "num_queried_tokens",
            "num_hit_tokens",
            "num_evicted_tokens",
        ):
            assert sum(getattr(stats, name) for stats in all_stats) == getattr(total.cache, name), name
        for name in ("num_running", "num_waiting"):
            assert sum(getattr(stats, name) for stats in all_stats) == getattr(total, name), name
    assert total.num_preemptions > 0
    assert all(stats.num_evicted_tokens and stats.num_hit_tokens for stats in all_stats)


def test_a_reset_drops_the_blocks_of_one_tenant_in_all_its_salts_and_of_no_other(make_harness: MakeHarness) -> None:
    harness = make_harness()
    prompt = ids(0, 3 * B)
    salted = encode_namespace(tenant="a", salt="s")
    for namespace in (A, salted, OTHER, UNNAMED):
        harness.ask(prompt, namespace=namespace)
    before = stats_of(harness, "a").num_cached_blocks
    assert harness.core.control(ResetCache("a")) == CacheWasReset(before, 0)
    assert stats_of(harness, "a").num_cached_blocks == 0
    cached = [harness.ask(prompt, namespace=namespace).num_cached_tokens for namespace in (A, salted, OTHER, UNNAMED)]
    assert cached == [0, 0, 3 * B - 1, 3 * B - 1]
    assert harness.core.control(ResetCache("a")) == CacheWasReset(before, 0)


def test_a_reset_keeps_what_a_tenants_running_requests_hold(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=B)
    harness.ask(ids(100, B), namespace=A)
    request_id = harness.add(ids(0, 2 * B), namespace=A)
    harness.step()
    dropped = harness.core.control(ResetCache("a"))
    assert isinstance(dropped, CacheWasReset)
    assert (dropped.num_dropped_blocks > 0, dropped.num_kept_blocks) == (True, 1)
    assert harness.result_of(request_id).answers[0].finish_reason == "length"


def test_a_reset_of_no_tenant_drops_the_blocks_of_all(make_harness: MakeHarness) -> None:
    harness = make_harness()
    for namespace in (A, OTHER, UNNAMED):
        harness.ask(ids(0, 3 * B), namespace=namespace)
    harness.reset_cache()
    assert harness.stats.cache.num_free_blocks == harness.stats.cache.num_blocks


def test_a_tenant_that_fills_its_queue_is_refused_and_no_other(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1, max_queued_requests=2)
    running, *waiting, refused = (harness.add(ids(number, 20), namespace=A) for number in range(3))
    assert not harness.failures
    full = harness.add(ids(9, 20), namespace=A)
    other = harness.add(ids(10, 20), namespace=OTHER)
    harness.run()
    assert harness.failures.keys() == {refused, full}
    assert "2 requests are waiting" in harness.failures[full].message
    assert all(harness.results[done].answers[0].finish_reason for done in (running, *waiting, other))

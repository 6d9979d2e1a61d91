"""Requests with a prefix in common, none of it cached: it is computed once, and nobody waits for it too long."""

import random
from collections import Counter
from typing import get_args

import pytest

from radixserve.config import SchedulePolicy
from radixserve.core.sequence import Request, SequenceStatus
from tests.core.scheduling import BLOCK_SIZE as B
from tests.core.scheduling import Scheduling, own

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_requests", [2, 4, 16])
@pytest.mark.parametrize("num_prefixes", [1, 3])
@pytest.mark.parametrize("budget", [2 * B, 5 * B + 1, 1000])
@pytest.mark.parametrize("tail", [0, 3, 9 * B])
def test_a_new_prefix_is_computed_once_however_many_come_with_it(
    policy: SchedulePolicy, num_requests: int, num_prefixes: int, budget: int, tail: int
) -> None:
    scheduling = Scheduling(
        num_blocks=800, max_num_seqs=min(budget, 64), max_num_batched_tokens=budget, schedule_policy=policy
    )
    prefixes = [own(number, 6 * B) for number in range(num_prefixes)]
    for number in range(num_requests):
        for prefix in prefixes:
            scheduling.add(prefix + own(10 + len(scheduling.requests), tail), priority=-number)
    scheduling.run()
    # A request always computes its last token itself.
    num_own_tokens = num_requests * tail if tail else num_requests - 1
    assert scheduling.num_computed_tokens == num_prefixes * (6 * B + num_own_tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_each_go_a_block_further_do_not_start_one_a_step(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(num_blocks=800, max_num_seqs=64, max_num_batched_tokens=2000, schedule_policy=policy)
    longest = own(0, 24 * B)
    for num_blocks in range(1, 25):
        scheduling.add([*longest[: num_blocks * B], num_blocks])
    for _ in range(2):
        scheduling.step()
    assert all(request.is_finished for request in scheduling.requests)
    scheduling.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_of_prefixes_that_share_a_head_each_is_computed_once_and_the_head_once_for_each(
    policy: SchedulePolicy,
) -> None:
    """Two depths at once, and nobody may wait for two steps: so one of each kind computes the head."""
    scheduling = Scheduling(num_blocks=800, max_num_seqs=64, max_num_batched_tokens=2000, schedule_policy=policy)
    head, kinds = own(0, 10 * B), [own(1 + kind, 10 * B) for kind in range(3)]
    for number in range(24):
        scheduling.add(head + kinds[number % 3] + own(10 + number, 3))
    for _ in range(2):
        scheduling.step()
    assert all(request.is_finished for request in scheduling.requests)
    assert scheduling.num_computed_tokens == 3 * (10 * B + 10 * B) + 24 * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_chain_of_prompts_computes_twice_is_less_than_a_step_holds(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(num_blocks=800, max_num_seqs=32, max_num_batched_tokens=40 * B, schedule_policy=policy)
    longest = own(0, 64 * B)
    for num_blocks in range(1, 65):
        scheduling.add(longest[: num_blocks * B])
    num_steps = 0
    while scheduling.scheduler.has_work:
        scheduling.step()
        num_steps += 1
    assert num_steps < 64 // 4
    assert scheduling.num_computed_tokens < 64 * 64 * B // 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_for_a_prefix_longer_than_to_compute_it_takes(policy: SchedulePolicy, seed: int) -> None:
    """Seen from outside: a step that had room for more, and left someone waiting whose turn it was."""
    rng = random.Random(seed)
    budget = rng.choice([40 * B, 120 * B, 200 * B])
    scheduling = Scheduling(num_blocks=4000, max_num_seqs=budget, max_num_batched_tokens=budget, schedule_policy=policy)
    num_waited: Counter[Request] = Counter()
    num_waits = 0
    # A tree of prefixes: each goes on from some point of an earlier one.
    prefixes = [own(0, 12 * B)]
    arrivals = []
    for number in range(56):
        shared = rng.choice(prefixes[-4:])
        num_shared = len(shared) if rng.random() < 0.7 else rng.randint(0, len(shared))
        prompt = [*shared[:num_shared], *own(1 + number, rng.randint(1, 4 * B))]
        prefixes.append(prompt)
        num_steps = rng.choice([0, 0, 0, 0, 0, 1, 4])
        arrivals.append((prompt, num_steps, rng.randrange(3), rng.randint(1, 4), rng.choice("aab")))
    for prompt, num_steps, priority, num_answer_tokens, tenant in [*arrivals, ([1], 400, 0, 1, "a")]:
        scheduling.add(prompt, priority=priority, max_tokens=num_answer_tokens, tenant=tenant)
        if rng.random() < 0.05:
            scheduling.scheduler.end(rng.choice(scheduling.requests))
        for _ in range(num_steps):
            missing = {request: num_missing_tokens(scheduling, request) for request in waiting(scheduling)}
            has_room = scheduling.step().num_tokens < budget
            for request in front(waiting(scheduling), policy) if has_room else []:
                if request in missing:
                    num_waited[request] += 1
                    assert num_waited[request] <= -(-missing[request] // budget)
                    num_waits += 1
            for request in scheduling.requests:
                if request not in waiting(scheduling):
                    num_waited[request] = 0
    assert all(request.is_finished for request in scheduling.requests)
    assert num_waits > 0


def waiting(scheduling: Scheduling) -> list[Request]:
    return [request for request in scheduling.requests if request.sequences[0].status is SequenceStatus.WAITING]


def front(requests: list[Request], policy: SchedulePolicy) -> list[Request]:
    """Those of each tenant that nobody waits before: whoever has run or has a better priority goes first."""

    def place(request: Request) -> tuple[int, bool]:
        return (request.priority if policy == "priority" else 0, not request.has_started)

    first = {tenant: min(map(place, of)) for tenant, of in by_tenant(requests).items()}
    return [request for request in requests if place(request) == first[request.tenant]]


def by_tenant(requests: list[Request]) -> dict[str | None, list[Request]]:
    return {
        tenant: [request for request in requests if request.tenant == tenant]
        for tenant in {request.tenant for request in requests}
    }


def num_missing_tokens(scheduling: Scheduling, request: Request) -> int:
    (sequence, *_) = request.sequences
    return sequence.num_tokens - scheduling.cache.match(sequence).num_tokens

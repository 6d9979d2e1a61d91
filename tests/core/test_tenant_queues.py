"""Tenants take turns, whatever the cache holds of their prompts."""

import random
from typing import get_args

import pytest

from radixserve.config import SchedulePolicy
from radixserve.core.policy import ROUND_SIZE
from radixserve.core.sequence import Request
from tests.core.scheduling import BLOCK_SIZE as B
from tests.core.scheduling import Scheduling, own

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)


def tenants_of(requests: list[Request]) -> str:
    return "".join(request.tenant or "-" for request in requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_that_floods_the_queue_delays_another_by_one_turn(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(max_num_seqs=1, schedule_policy=policy)
    for number in range(12):
        scheduling.add(own(number, 5), tenant="a")
    for _ in range(3):
        scheduling.step()
    for number in range(4):
        scheduling.add(own(20 + number, 5), tenant="b")
    scheduling.run()
    assert tenants_of(scheduling.starts) == "aaa" + "babababa" + "aaaaa"
    assert scheduling.scheduler.num_overtakes == 0  # of requests of one tenant


def test_turns_go_round_among_all_who_wait_and_the_tenant_without_a_name_is_one_of_them() -> None:
    scheduling = Scheduling(max_num_seqs=1)
    for tenant, num_requests in (("a", 4), (None, 3), ("c", 2)):
        for _ in range(num_requests):
            scheduling.add(own(len(scheduling.requests), 5), tenant=tenant)
    scheduling.run()
    assert tenants_of(scheduling.starts) == "a-ca-ca-a"


def test_who_comes_back_has_no_turns_saved_up() -> None:
    scheduling = Scheduling(max_num_seqs=1)
    scheduling.add(own(0, 5), tenant="b")
    scheduling.run()
    for number in range(20):
        scheduling.add(own(1 + number, 5), tenant="a")
    for _ in range(10):
        scheduling.step()
    for number in range(5):
        scheduling.add(own(30 + number, 5), tenant="b")
    scheduling.run()
    assert tenants_of(scheduling.starts) == "b" + "a" * 10 + "ba" * 5 + "a" * 5


def test_an_aborted_request_takes_no_turn() -> None:
    scheduling = Scheduling(max_num_seqs=1)
    for number in range(4):
        scheduling.add(own(number, 5), tenant="a")
    aborted = [scheduling.add(own(10 + number, 5), tenant="b") for number in range(3)]
    for request in aborted[:2]:
        scheduling.scheduler.end(request)
    scheduling.run()
    assert tenants_of(scheduling.starts) == "abaaa"


@pytest.mark.parametrize("policy", ["cache-aware", "fcfs"])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_a_tenant_does_not_tell_whether_another_hits_the_cache(policy: SchedulePolicy, seed: int) -> None:
    """Both ways its requests take a place for a step each; that is all of them that the other tenant can see."""
    orders = set()
    for hits in (True, False):
        rng = random.Random(seed)
        scheduling = Scheduling(num_blocks=400, max_num_seqs=2, max_num_batched_tokens=100, schedule_policy=policy)
        for number in range(60):
            if rng.random() < 0.5:
                scheduling.add(own(rng.randrange(3), 4 * B) + own(10 + number, 2), tenant="a")
            else:
                scheduling.add(own(1000 if hits else 2000 + number, 5 * B) + own(10 + number, 2), tenant="b")
            if number % 10 == 9:
                scheduling.step()
        scheduling.run()
        assert sum(request.num_cached_tokens or 0 for request in scheduling.requests if request.tenant == "b") > 0 or (
            not hits
        )
        of_a = [request.request_id for request in scheduling.starts if request.tenant == "a"]
        orders.add((tenants_of(scheduling.starts), *of_a))
    assert len(orders) == 1


def test_a_round_is_a_tenants_own() -> None:
    """However many requests of others come in between, the hits of ROUND_SIZE of a tenant's go first."""
    scheduling = Scheduling(num_blocks=400, max_num_seqs=1)
    warm = own(0, 3 * B)
    scheduling.add(warm, tenant="a")
    scheduling.run()
    for number in range(ROUND_SIZE - 2):
        scheduling.add(own(1 + number, 1), tenant="a")
        for _ in range(3):
            scheduling.add(own(100 + len(scheduling.requests), 1), tenant="b")
    hit = scheduling.add([*warm, 1], tenant="a")
    scheduling.run()
    assert [request for request in scheduling.starts if request.tenant == "a"][1] is hit
    assert scheduling.scheduler.num_overtakes == ROUND_SIZE - 2


def test_a_tenant_whose_requests_wait_for_a_prefix_holds_up_no_other() -> None:
    scheduling = Scheduling(max_num_seqs=4, max_num_batched_tokens=8 * B)
    prefix = own(0, 3 * B)
    writer, waits = (scheduling.add([*prefix, last], tenant="a") for last in (1, 2))
    other = scheduling.add(own(1, 5), tenant="b")
    scheduling.step()
    assert (writer.has_started, waits.has_started, other.has_started) == (True, False, True)
    scheduling.run()
    assert waits.num_cached_tokens == 3 * B


def test_a_digest_that_another_tenant_forged_delays_nobody() -> None:
    scheduling = Scheduling(digest=lambda parent, content: bytes(16))
    requests = [scheduling.add(own(number, 3 * B), tenant=tenant) for number, tenant in enumerate("aab")]
    scheduling.step()
    # Inside a tenant equal digests are taken for equal prompts, which costs the second one a step.
    assert [request.has_started for request in requests] == [True, False, True]
    scheduling.run()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_mix_of_tenants_ends_and_nobody_is_overtaken_too_often(policy: SchedulePolicy, seed: int) -> None:
    rng = random.Random(seed)
    scheduling = Scheduling(num_blocks=9, max_num_seqs=5, max_num_batched_tokens=7, schedule_policy=policy)
    for number in range(120):
        prompt = own(rng.randrange(3), B * rng.randrange(4)) + own(10 + number, rng.randint(1, 3 * B))
        params = {"max_tokens": rng.randint(1, 2 * B), "n": rng.choice([1, 1, 5])}
        scheduling.add(prompt, tenant=rng.choice([None, "a", "a", "b"]), priority=rng.randrange(3), **params)
        if rng.random() < 0.1:
            scheduling.scheduler.end(rng.choice(scheduling.requests))
        scheduling.step()
    scheduling.run(20_000)
    assert scheduling.scheduler.num_preemptions > 0
    if policy != "priority":
        for tenant in (None, "a", "b"):
            own_starts = [int(request.request_id) for request in scheduling.starts if request.tenant == tenant]
            overtaken = [sum(later > came for later in own_starts[:place]) for place, came in enumerate(own_starts)]
            assert max(overtaken) < ROUND_SIZE

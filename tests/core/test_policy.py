"""The order in which requests start, under each policy, and who gives way when the pool is exhausted."""

import random
from array import array
from typing import get_args

import pytest

from radixserve.config import SchedulePolicy
from radixserve.core.policy import ROUND_SIZE, Policy
from radixserve.core.sequence import Request, Sequence, SequenceStatus
from radixserve.core.waiting import WaitingQueue
from radixserve.sampling_params import SamplingParams
from tests.core.scheduling import BLOCK_SIZE as B
from tests.core.scheduling import Scheduling, own

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)


@pytest.mark.parametrize("num_warm", [ROUND_SIZE, 500])
def test_sc_2_a_cold_request_starts_after_a_fixed_number_of_warm_ones(num_warm: int) -> None:
    scheduling = Scheduling(max_num_seqs=1)
    warm = own(0, 3 * B)
    scheduling.add(warm)
    scheduling.run()
    cold = scheduling.add(own(1, 3 * B))
    for number in range(num_warm):
        scheduling.add([*warm, *own(2 + number, 1)])
        scheduling.step()
    assert 0 < scheduling.num_overtaken(cold) < ROUND_SIZE
    scheduling.run()


@pytest.mark.parametrize("policy", ["cache-aware", "fcfs"])
@pytest.mark.parametrize("seed", range(8))
def test_nobody_is_overtaken_more_often_than_the_bound_says(policy: SchedulePolicy, seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs = rng.choice([2, 3, 8])
    scheduling = Scheduling(
        num_blocks=rng.choice([14, 40]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([8, 40]),
        schedule_policy=policy,
    )
    prefixes = [own(number, B * rng.randint(1, 6)) for number in range(4)]
    # Bursts and lulls, so that rounds fill up and empty at every place.
    for number in range(300):
        # Mostly one prefix, so that the others would starve.
        prefix = prefixes[0] if rng.random() < 0.8 else rng.choice(prefixes)
        prompt = prefix + own(10 + number, rng.randint(1, 9))
        scheduling.add(prompt, max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2]))
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            scheduling.step()
    scheduling.run(20_000)
    overtaken = [scheduling.num_overtaken(request) for request in scheduling.requests]
    assert max(overtaken) < ROUND_SIZE
    assert scheduling.scheduler.num_overtakes == sum(overtaken)
    assert (policy == "fcfs") or max(overtaken) > ROUND_SIZE // 2


@pytest.mark.parametrize("policy", POLICIES)
def test_without_hits_requests_start_first_come_first_served(policy: SchedulePolicy) -> None:
    rng = random.Random(3)
    scheduling = Scheduling(max_num_seqs=2, schedule_policy=policy)
    for number in range(100):
        scheduling.add(own(number, rng.randint(1, 40)), max_tokens=rng.randint(1, 5))
        if rng.random() < 0.3:
            scheduling.step()
    scheduling.run()
    assert scheduling.starts == scheduling.requests


def test_a_pool_that_does_not_hold_all_prefixes_is_used_better_by_cache_aware_order() -> None:
    num_computed_tokens = {}
    for policy in ("cache-aware", "fcfs"):
        rng = random.Random(1)
        # Room for two of the six prefixes, beside the tokens that the running requests own.
        scheduling = Scheduling(num_blocks=24, max_num_seqs=2, schedule_policy=policy)
        for number in range(60):
            scheduling.add(own(rng.randrange(6), 9 * B) + own(10 + number, 3))
        scheduling.run()
        num_computed_tokens[policy] = scheduling.num_computed_tokens
    assert num_computed_tokens["cache-aware"] == 60 * 3 + 6 * 9 * B
    assert num_computed_tokens["fcfs"] > 2 * num_computed_tokens["cache-aware"]


def test_a_hit_goes_first_and_the_others_keep_their_order() -> None:
    scheduling = Scheduling(max_num_seqs=1)
    warm = own(0, 2 * B)
    scheduling.add(warm)
    scheduling.run()
    cold, few, many, last = (
        scheduling.add(prompt)
        for prompt in (own(1, 9), [*warm[:B], *own(2, 9)], [*warm, *own(3, 9)], [*warm[: B - 1], *own(4, 9)])
    )
    scheduling.run()
    # Less than a block in common is no reason to overtake.
    assert scheduling.starts[1:] == [many, few, cold, last]


def test_a_better_priority_starts_first_and_equal_ones_come_first_served() -> None:
    scheduling = Scheduling(max_num_seqs=1, schedule_policy="priority")
    scheduling.add(own(0, 5), max_tokens=3)
    scheduling.step()
    priorities = [0, 5, -1, 5, 0, -1]
    requests = [scheduling.add(own(1 + number, 5), priority=priority) for number, priority in enumerate(priorities)]
    scheduling.run()
    assert scheduling.starts[1:] == [requests[index] for index in (2, 5, 0, 4, 1, 3)]


@pytest.mark.parametrize("policy", ["cache-aware", "fcfs"])
def test_only_the_priority_policy_looks_at_priorities(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(max_num_seqs=1, schedule_policy=policy)
    for number in range(4):
        scheduling.add(own(number, 5), priority=-number)
    scheduling.run()
    assert scheduling.starts == scheduling.requests


def test_the_worst_priority_gives_way_and_comes_back_last() -> None:
    scheduling = Scheduling(num_blocks=9, schedule_policy="priority")
    worst = scheduling.add(own(0, B), priority=2, max_tokens=4 * B)
    best, middle = (scheduling.add(own(1 + p, B), priority=p, max_tokens=4 * B) for p in (0, 1))
    while not scheduling.scheduler.num_preemptions:
        scheduling.step()
    assert worst.sequences[0].block_table == array("i")
    while not middle.is_finished:
        assert not worst.is_finished
        scheduling.step()
    scheduling.run()
    assert best.sequences[0].num_output_tokens == worst.sequences[0].num_output_tokens == 4 * B


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_a_new_prefix_that_many_wait_for_is_computed_once(policy: SchedulePolicy, max_num_batched_tokens: int) -> None:
    scheduling = Scheduling(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, schedule_policy=policy)
    prefix = own(0, 6 * B)
    for number in range(6):
        scheduling.add(prefix + own(1 + number, 3), priority=-number)
    scheduling.run()
    assert scheduling.num_computed_tokens == 6 * B + 6 * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_waits_for_a_prefix_computes_it_when_its_writer_is_cancelled(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(max_num_batched_tokens=2 * B, schedule_policy=policy)
    prefix = own(0, 6 * B)
    writer, *others = (scheduling.add(prefix + own(1 + number, 3)) for number in range(3))
    scheduling.step()
    scheduling.scheduler.end(writer)
    scheduling.run()
    # Nothing that the writer has computed is computed again.
    assert scheduling.num_computed_tokens == 6 * B + 2 * 3
    assert all(request.is_finished for request in others)


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_waits_for_a_prefix_gets_it_though_its_writer_is_preempted(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(num_blocks=12, max_num_batched_tokens=2 * B, schedule_policy=policy)
    scheduling.add(own(0, B), max_tokens=11 * B)
    while scheduling.requests[0].sequences[0].num_output_tokens < 3 * B:
        scheduling.step()
    prefix = own(1, 6 * B)
    scheduling.add(prefix + own(2, 1), max_tokens=2 * B)
    scheduling.add(prefix + own(3, 1), max_tokens=2 * B)
    scheduling.run()
    assert scheduling.scheduler.num_preemptions > 0
    assert [request.sequences[0].num_output_tokens for request in scheduling.requests] == [11 * B, 2 * B, 2 * B]


def test_a_better_priority_takes_over_the_prefix_that_a_worse_one_computes() -> None:
    scheduling = Scheduling(max_num_batched_tokens=2 * B, schedule_policy="priority")
    prefix = own(0, 8 * B)
    writer = scheduling.add(prefix + own(1, 40 * B), priority=9)
    scheduling.step()
    urgent = scheduling.add(prefix + own(2, 2 * B), priority=0)
    for _ in range(4):
        scheduling.step()
    assert urgent.is_finished
    assert urgent.num_cached_tokens == 2 * B
    scheduling.run()
    assert writer.is_finished
    assert scheduling.num_computed_tokens == 8 * B + 40 * B + 2 * B


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_takes_the_room_of_a_prompt_in_chunks(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(num_blocks=12, max_num_batched_tokens=B, schedule_policy=policy)
    long = scheduling.add(own(0, 9 * B))
    for number in range(9):
        assert not long.is_finished
        scheduling.add(own(1 + number, 1), max_tokens=8 * B)
        scheduling.step()
    assert long.is_finished
    assert scheduling.scheduler.num_preemptions == 0
    scheduling.run()


def test_who_hits_blocks_that_others_may_need_waits_for_room() -> None:
    scheduling = Scheduling(num_blocks=7)
    warm = own(0, 4 * B)
    scheduling.add(warm)
    scheduling.run()
    scheduling.add(own(1, B), max_tokens=3 * B)
    scheduling.step()
    # It needs one block more than it hits, and one is free; but what it hits is room that the other one will need.
    scheduling.add([*warm, *own(2, 3)], max_tokens=6)
    scheduling.run()
    assert scheduling.scheduler.num_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_round_waits_for_who_waits_for_a_prefix(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(schedule_policy=policy)
    for number in range(ROUND_SIZE - 2):
        scheduling.add(own(number, 1))
    scheduling.run()
    prefix = own(100, 3 * B)
    writer, waits, later = (scheduling.add(prompt) for prompt in ([*prefix, 1], [*prefix, 2], own(101, 1)))
    scheduling.step()
    assert (writer.has_started, waits.has_started, later.has_started) == (True, False, False)
    scheduling.step()
    assert waits.has_started
    scheduling.run()
    assert scheduling.scheduler.num_overtakes == 0


def test_an_answer_advances_beside_the_prompt_in_chunks_of_an_earlier_request() -> None:
    scheduling = Scheduling(max_num_batched_tokens=B)
    warm = own(0, 2 * B)
    scheduling.add(warm)
    scheduling.run()
    long = scheduling.add(own(1, 8 * B))
    overtaking = scheduling.add([*warm, *own(2, 1)], max_tokens=8)
    for num_tokens in range(1, 9):
        scheduling.step()
        assert overtaking.sequences[0].num_output_tokens == num_tokens
    assert not long.is_finished
    scheduling.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_advances_beside_a_full_batch_of_answers(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(max_num_seqs=4, max_num_batched_tokens=4, schedule_policy=policy)
    for number in range(3):
        scheduling.add(own(number, 1), max_tokens=40)
    scheduling.step()
    long = scheduling.add(own(3, 30))
    scheduling.step()
    for num_steps in range(1, 30):
        assert long.sequences[0].num_computed_tokens == num_steps
        scheduling.step()
    assert long.is_finished
    scheduling.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_sc_1_answers_of_one_request_that_do_not_fit_together_end_one_after_the_other(policy: SchedulePolicy) -> None:
    scheduling = Scheduling(num_blocks=6, max_num_seqs=8, schedule_policy=policy)
    request = scheduling.add(own(0, 2 * B + 1), n=8, max_tokens=4 * B - 1)
    scheduling.run(max_steps=8 * 4 * B)
    assert scheduling.scheduler.num_preemptions > 0
    assert [sequence.num_output_tokens for sequence in request.sequences] == [4 * B - 1] * 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_the_first_in_rank_always_advances_so_every_mix_ends(policy: SchedulePolicy, seed: int) -> None:
    rng = random.Random(seed)
    scheduling = Scheduling(num_blocks=9, max_num_seqs=5, max_num_batched_tokens=7, schedule_policy=policy)

    num_checked = 0

    def rank(request: Request) -> tuple[int, int]:
        return (request.priority if policy == "priority" else 0, request.arrival)

    for number in range(400):
        if number < 120:
            prompt = own(rng.randrange(3), B * rng.randrange(4)) + own(10 + number, rng.randint(1, 3 * B))
            params = {"max_tokens": rng.randint(1, 2 * B), "n": rng.choice([1, 1, 5])}
            scheduling.add(prompt, priority=rng.randrange(3), **params)
            if rng.random() < 0.1:
                scheduling.scheduler.end(rng.choice(scheduling.requests))
        unfinished = [request for request in scheduling.requests if not request.is_finished]
        first = min((request for request in unfinished if request.has_started), key=rank, default=None)
        is_first_of_all = first is not None and not any(rank(other)[0] < rank(first)[0] for other in unfinished)
        before = progress(first) if first is not None else (0, 0)
        scheduling.step()
        if first is not None and is_first_of_all and before[1] > 0:
            num_checked += 1
            assert progress(first) > before
    scheduling.run(20_000)
    assert num_checked > 100
    assert scheduling.scheduler.num_preemptions > 0


def progress(request: Request) -> tuple[int, int]:
    """How many answers of a request have ended, and how many tokens of the next one are computed."""
    unfinished = [sequence for sequence in request.sequences if sequence.status is not SequenceStatus.FINISHED]
    return len(request.sequences) - len(unfinished), unfinished[0].num_computed_tokens if unfinished else 0


@pytest.mark.parametrize(("has_run", "order"), [(False, ["hit", "cold"]), (True, ["cold", "hit"])])
def test_hits_go_before_others_among_new_requests_only(has_run: bool, order: list[str]) -> None:
    """What has run goes on by its rank, so that the first of all that have begun always advances."""
    scheduling = Scheduling()
    scheduling.add(own(0, 20))
    scheduling.run()
    queue = WaitingQueue(Policy(prefers_hits=True), scheduling.cache)
    for arrival, (name, prompt) in enumerate({"cold": own(1, 20), "hit": own(0, 20)}.items()):
        request = Request(name, SamplingParams(), b"", len(prompt), seed=0, arrival=arrival)
        request.num_cached_tokens = 0 if has_run else None
        request.sequences.append(Sequence(request, 0, array("i", prompt)))
        queue.add(request.sequences[0])
    assert [sequence.request.request_id for sequence, _ in next(queue.rounds())] == order

"""What does cache-aware order save where the pool is too small for all the prefixes that are asked for?

    python benchmarks/schedule_policy.py --queue 64 --fitting 3

Runs the scheduler and the cache without a model, so it counts tokens and steps, and gives the same on every machine.
Each request begins with one of eight long prefixes, at random. A fixed number of requests runs or waits at any time:
the next one comes when one is answered. Prints one JSON line for each policy.
"""

import argparse
import json
import random
import statistics
from array import array
from typing import Any

from radixserve.config import SchedulePolicy
from radixserve.core.batch import SampledTokens
from radixserve.core.kv_cache import KVCache
from radixserve.core.scheduler import Scheduler, SchedulerLimits
from radixserve.core.sequence import Request, Sequence
from radixserve.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_REQUESTS = 1000
NUM_PREFIXES = 8
PREFIX_TOKENS = 2048
OWN_TOKENS = 64
OUTPUT_TOKENS = 32
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", type=int, default=64, help="requests that run or wait at any time")
    parser.add_argument(
        "--fitting", type=float, default=3, help="prefixes that fit beside what the running requests own"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    policies: tuple[SchedulePolicy, ...] = ("fcfs", "cache-aware")
    for policy in policies:
        print(json.dumps(run(policy, arguments.queue, arguments.fitting, arguments.seed)))


def run(policy: SchedulePolicy, num_outstanding: int, num_fitting: float, seed: int) -> dict[str, Any]:
    """Answer all requests under a policy, and return what that took."""
    rng = random.Random(seed)
    own_blocks = MAX_NUM_SEQS * -(-(OWN_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
    num_blocks = int(num_fitting * PREFIX_TOKENS // BLOCK_SIZE) + own_blocks
    cache = KVCache(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        cache,
        SchedulerLimits(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=num_blocks * BLOCK_SIZE,
            end_token_ids=frozenset(),
            schedule_policy=policy,
        ),
    )
    prefixes = [tokens(rng, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    unsent = [new_request(rng, number, rng.choice(prefixes)) for number in range(NUM_REQUESTS)]
    unsent.reverse()
    queued_at: dict[Request, int] = {}
    started_at: dict[Request, int] = {}
    num_steps = num_computed_tokens = 0
    live: list[Request] = []
    while unsent or live:
        while unsent and len(live) < num_outstanding:
            live.append(unsent.pop())
            queued_at[live[-1]] = num_steps
            scheduler.add(live[-1])
        batch = scheduler.schedule()
        num_steps += 1
        num_computed_tokens += batch.num_tokens
        started_at |= {request: num_steps for request in live if request.has_started and request not in started_at}
        num_draws = sum(len(row.samples) for row in batch.rows)
        drawn = [rng.randrange(100_000) for _ in range(num_draws)]
        scheduler.update(batch, SampledTokens(drawn, [None] * num_draws, [True] * len(batch.rows)))
        live = [request for request in live if not request.is_finished]
    waits = [started_at[request] - queued_at[request] for request in queued_at]
    stats = cache.stats()
    return {
        "policy": policy,
        "queue": num_outstanding,
        "fitting_prefixes": num_fitting,
        "seed": seed,
        "hit_rate": round(stats.num_hit_tokens / stats.num_queried_tokens, 3),
        "computed_tokens": num_computed_tokens,
        "steps": num_steps,
        "preemptions": scheduler.num_preemptions,
        "overtakes": scheduler.num_overtakes,
        "wait_steps_mean": round(statistics.mean(waits)),
        "wait_steps_p99": round(statistics.quantiles(waits, n=100)[98]),
        "wait_steps_max": max(waits),
    }


def tokens(rng: random.Random, count: int) -> "array[int]":
    """Return random token ids."""
    return array("i", (rng.randrange(100_000) for _ in range(count)))


def new_request(rng: random.Random, number: int, prefix: "array[int]") -> Request:
    """Return a request that begins with a prefix."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    token_ids = prefix + tokens(rng, OWN_TOKENS)
    request = Request(str(number), params, b"", len(token_ids), seed=number)
    request.sequences.append(Sequence(request, 0, token_ids))
    return request


if __name__ == "__main__":
    main()

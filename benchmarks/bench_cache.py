"""What does the prefix cache itself cost, without a model, beside the two usual ways to build one?

    python benchmarks/bench_cache.py
    python benchmarks/bench_cache.py --questions prompt queue --repeat 50

Prints one JSON line for each question. prompt: finding and holding a cached prompt of 100,000 tokens, its digests, and
commit, release and eviction per block, with random prompts that share nothing in a full pool. queue: what thousands of
waiting prompts of that length add to a step, in a pool that those who run fill. memory: bytes of index for each cached
block, the token ids in it included.

In each round every cache gets the same prompt, one cache after the other.
"""

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from cache_baselines import DigestDictionary, LockedTree

from radixserve.bench.report import percentile
from radixserve.bench.serve import describe_environment
from radixserve.config import EvictionPolicy
from radixserve.core.batch import SampledTokens
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.scheduler import Scheduler, SchedulerLimits
from radixserve.core.sequence import Request, Sequence
from radixserve.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 100_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
# The most that a step computes of a prompt, and so the most that enters the tree at once.
CHUNK_TOKENS = 2048
VOCAB_SIZE = 150_000

Round = Callable[["array[int]"], dict[str, float]]


def main() -> None:
    questions = {"prompt": measure_prompt, "queue": measure_queue, "memory": measure_memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", choices=questions, default=list(questions))
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--prefix-tokens", type=int, default=2048, help="cached ones of each that waits")
    parser.add_argument("--pool-blocks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for question in arguments.questions:
        environment = describe_environment()
        gc.collect()
        document = {
            "question": question,
            "seed": arguments.seed,
            "block_size": BLOCK_SIZE,
            **questions[question](arguments),
            "environment": environment,
        }
        print(msgspec.json.encode(document).decode(), flush=True)


def measure_prompt(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one long prompt in each cache."""
    rng = np.random.default_rng(arguments.seed)
    rounds: dict[str, Round] = {
        "radixserve": RadixTreeRounds(arguments.pool_blocks),
        "radixserve_lru": RadixTreeRounds(arguments.pool_blocks, "lru"),
        "digest_dictionary": DictionaryRounds(arguments.pool_blocks),
        "locked_tree": LockedTreeRounds(arguments.pool_blocks),
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in rounds}
    # The first rounds fill the pool, so that every later one evicts.
    num_warm_up = arguments.pool_blocks // PROMPT_BLOCKS + 1
    for number in range(num_warm_up + arguments.repeat):
        token_ids = random_tokens(rng, PROMPT_TOKENS)
        for name, measure in rounds.items():
            taken = measure(token_ids)
            for figure, value in taken.items() if number >= num_warm_up else ():
                seconds[name].setdefault(figure, []).append(value * 1e6)
    return {
        "n": arguments.repeat,
        "prompt_tokens": PROMPT_TOKENS,
        "pool_blocks": arguments.pool_blocks,
        "microseconds": {name: {key: spread(values) for key, values in of.items()} for name, of in seconds.items()},
    }


class RadixTreeRounds:
    """The product's own cache, by what the scheduler calls of it."""

    def __init__(self, num_blocks: int, eviction_policy: EvictionPolicy = "learned-reuse") -> None:
        self.cache = KVCache(num_blocks, BLOCK_SIZE, CacheSettings(eviction_policy=eviction_policy))

    def __call__(self, token_ids: "array[int]") -> dict[str, float]:
        cache = self.cache
        seconds = dict.fromkeys(("digests", "evict_per_block", "commit_per_block"), 0.0)
        sequence = new_request(token_ids).sequences[0]
        with Timed(seconds, "digests"):
            cache.next_digest(sequence, PROMPT_BLOCKS - 1)
        match = cache.match(sequence)
        while sequence.num_uncomputed_tokens:
            num_tokens = min(CHUNK_TOKENS, sequence.num_uncomputed_tokens)
            with Timed(seconds, "evict_per_block", PROMPT_BLOCKS):
                has_room = cache.allocate(sequence, num_tokens, None if sequence.block_table else match)
            assert has_room
            sequence.num_computed_tokens += num_tokens
            with Timed(seconds, "commit_per_block", PROMPT_BLOCKS):
                cache.commit(sequence)
            cache.end_step()
        with Timed(seconds, "release_per_block", PROMPT_BLOCKS):
            cache.release(sequence)
        again = new_request(token_ids).sequences[0]
        cache.next_digest(again, PROMPT_BLOCKS - 1)
        with Timed(seconds, "match_and_attach"):
            cache.allocate(again, 1, cache.match(again))
        assert again.num_computed_tokens == PROMPT_TOKENS - 1
        cache.take_copies()
        cache.end_step()
        cache.release(again)
        return seconds


class DictionaryRounds:
    """The dictionary of digests."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = DigestDictionary(num_blocks, BLOCK_SIZE)

    def __call__(self, token_ids: "array[int]") -> dict[str, float]:
        seconds: dict[str, float] = {}
        tokens = token_ids.tolist()
        with Timed(seconds, "digests"):
            keys = self.cache.digests(tokens)
        with Timed(seconds, "evict_per_block", PROMPT_BLOCKS):
            blocks = self.cache.take(PROMPT_BLOCKS)
        with Timed(seconds, "commit_per_block", PROMPT_BLOCKS):
            self.cache.commit(keys, blocks)
        with Timed(seconds, "release_per_block", PROMPT_BLOCKS):
            self.cache.release(blocks)
        with Timed(seconds, "match_and_attach"):
            found = self.cache.attach(keys)
        assert len(found) == PROMPT_BLOCKS
        self.cache.release(found)
        return seconds


class LockedTreeRounds:
    """The tree compared by tokens, which needs no digests."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = LockedTree(num_blocks, BLOCK_SIZE)

    def __call__(self, token_ids: "array[int]") -> dict[str, float]:
        seconds: dict[str, float] = {}
        tokens = token_ids.tolist()
        node, _ = self.cache.attach(tokens)
        with Timed(seconds, "evict_per_block", PROMPT_BLOCKS):
            block_ids = self.cache.take(PROMPT_BLOCKS)
        with Timed(seconds, "commit_per_block", PROMPT_BLOCKS):
            node = self.cache.commit(node, tokens, block_ids)
        with Timed(seconds, "release_per_block", PROMPT_BLOCKS):
            self.cache.release(node)
        with Timed(seconds, "match_and_attach"):
            node, found = self.cache.attach(tokens)
        assert len(found) == PROMPT_BLOCKS
        self.cache.release(node)
        return seconds


def measure_queue(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the time that the scheduler takes for a step with many waiting, and for the same step with nobody."""
    queue = Queue(arguments.seed, arguments.waiting, arguments.prefix_tokens, arguments.pool_blocks)
    steps = {"waiting": queue.run(arguments.repeat * 10)}
    arrivals = [queue.come_and_go() for _ in range(arguments.repeat * 10)]
    queue.clear()
    steps["none_waiting"] = queue.run(arguments.repeat * 10)
    medians = {name: statistics.median(seconds) * 1e6 for name, seconds in steps.items()}
    return {
        "n": arguments.repeat * 10,
        "num_waiting": arguments.waiting,
        "prompt_tokens": PROMPT_TOKENS,
        "prefix_tokens": arguments.prefix_tokens,
        "num_running": len(queue.running),
        "pool_blocks": queue.num_blocks,
        "queue_microseconds": round(medians["waiting"] - medians["none_waiting"], 3),
        "step_microseconds": {name: spread([value * 1e6 for value in seconds]) for name, seconds in steps.items()},
        "come_and_go_microseconds": spread([value * 1e6 for value in arrivals]),
    }


class Queue:
    """A scheduler in whose pool nobody else fits, though some blocks are spare: each step looks for someone who does.

    The prompts begin with one of eight prefixes, which the cache has; each has tokens of its own behind it. Those that
    wait are NUM_DIFFERENT prompts over and over, whose token ids they share, so that they fit in memory.
    """

    NUM_PREFIXES = 8
    NUM_DIFFERENT = 100
    ANSWER_BLOCKS = 64

    def __init__(self, seed: int, num_waiting: int, prefix_tokens: int, max_blocks: int) -> None:
        self.tokens_rng = np.random.default_rng(seed)
        self.rng = random.Random(seed)
        self.own_tokens = PROMPT_TOKENS - prefix_tokens
        self.prefixes = [random_tokens(self.tokens_rng, prefix_tokens) for _ in range(self.NUM_PREFIXES)]
        # Less is spare than one of those that wait needs, but enough for the answers of those that run.
        own_blocks = -(-self.own_tokens // BLOCK_SIZE)
        num_shared_blocks = self.NUM_PREFIXES * prefix_tokens // BLOCK_SIZE
        self.num_running = (max_blocks - num_shared_blocks - own_blocks) // (own_blocks + self.ANSWER_BLOCKS)
        self.num_blocks = num_shared_blocks + self.num_running * (own_blocks + self.ANSWER_BLOCKS) + own_blocks // 2
        limits = SchedulerLimits(
            max_num_seqs=4 * self.num_running,
            max_num_batched_tokens=8192,
            max_model_len=2 * PROMPT_TOKENS,
            end_token_ids=frozenset(),
        )
        self.scheduler = Scheduler(KVCache(self.num_blocks, BLOCK_SIZE), limits)
        self.running = [self.add(self.new_prompt(number)) for number in range(self.num_running)]
        while any(sequence.num_output_tokens == 0 for request in self.running for sequence in request.sequences):
            self.run(1)
        different = [self.new_prompt(number) for number in range(self.NUM_DIFFERENT)]
        self.waiting = [self.add(different[number % len(different)]) for number in range(num_waiting)]

    def new_prompt(self, number: int) -> "array[int]":
        """Return one of the prefixes with tokens behind it that no other prompt has."""
        return self.prefixes[number % len(self.prefixes)] + random_tokens(self.tokens_rng, self.own_tokens)

    def add(self, prompt: "array[int]") -> Request:
        """Queue a request."""
        request = new_request(prompt)
        self.scheduler.add(request)
        return request

    def clear(self) -> None:
        """End all that wait."""
        for request in self.waiting:
            self.scheduler.end(request)

    def come_and_go(self) -> float:
        """Return the seconds that it takes to end one that waits, somewhere in the queue, and to add another."""
        index = self.rng.randrange(len(self.waiting))
        request = new_request(self.waiting[index].sequences[0].token_ids)
        start = time.perf_counter()
        self.scheduler.end(self.waiting[index])
        self.scheduler.add(request)
        elapsed = time.perf_counter() - start
        self.waiting[index] = request
        return elapsed

    def run(self, num_steps: int) -> list[float]:
        """Return the seconds that each step's schedule() took."""
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            batch = self.scheduler.schedule()
            seconds.append(time.perf_counter() - start)
            num_draws = sum(len(row.samples) for row in batch.rows)
            drawn = [self.rng.randrange(VOCAB_SIZE) for _ in range(num_draws)]
            self.scheduler.update(batch, SampledTokens(drawn, [None] * num_draws, [True] * len(batch.rows)))
        assert self.scheduler.num_running <= self.num_running
        return seconds


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the bytes that each cache allocates for a full pool of cached prompts that share nothing."""
    num_prompts = arguments.pool_blocks // PROMPT_BLOCKS
    num_blocks = num_prompts * PROMPT_BLOCKS
    kinds: dict[str, Callable[[int], Round]] = {
        "radixserve": RadixTreeRounds,
        "radixserve_lru": partial(RadixTreeRounds, eviction_policy="lru"),
        "digest_dictionary": DictionaryRounds,
        "locked_tree": LockedTreeRounds,
    }
    size = {}
    for name, kind in kinds.items():
        rng = np.random.default_rng(arguments.seed)
        gc.collect()
        tracemalloc.start()
        measure = kind(num_blocks)
        for _ in range(num_prompts):
            measure(random_tokens(rng, PROMPT_TOKENS))
        gc.collect()
        size[name] = round(tracemalloc.get_traced_memory()[0] / num_blocks, 1)
        tracemalloc.stop()
        del measure
    return {"n": 1, "num_blocks": num_blocks, "bytes_per_cached_block": size}


class Timed:
    """Adds the seconds of a with block, divided by a count, to an entry of a dictionary."""

    def __init__(self, seconds: dict[str, float], name: str, divisor: int = 1) -> None:
        self.seconds, self.name, self.divisor = seconds, name, divisor

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        elapsed = (time.perf_counter() - self.start) / self.divisor
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + elapsed


def spread(values: list[float]) -> dict[str, float]:
    """Return median, p10 and p90."""
    figures = {"median": statistics.median(values), "p10": percentile(values, 10), "p90": percentile(values, 90)}
    return {name: round(value, 3) for name, value in figures.items()}


def random_tokens(rng: np.random.Generator, count: int) -> "array[int]":
    """Return random token ids."""
    return array("i", rng.integers(VOCAB_SIZE, size=count, dtype=np.int32).tobytes())


def new_request(token_ids: "array[int]") -> Request:
    """Return a request for a long answer, which is appended to token_ids."""
    params = SamplingParams(max_tokens=100_000, ignore_eos=True)
    request = Request("", params, b"", len(token_ids), seed=0)
    request.sequences.append(Sequence(request, 0, token_ids))
    return request


if __name__ == "__main__":
    main()

"""How much longer does a decode step take while blocks are copied out beside it and written to a disk?

    python benchmarks/tier_steps.py --rows 4 --rounds 8

One engine with the demo model. In each round it runs steps without a save, then as many with one, which copies blocks
of a cached prompt out and writes them. The store forgets between rounds, so that each save writes all of them again.
Prints a JSON line: milliseconds a step, median and least, and the blocks that were written while steps were measured.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixserve.config import EngineConfig
from radixserve.core.block_store import BlockBytes
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.async_engine import load_tokenizer
from radixserve.engine.core import EngineCore
from radixserve.protocol import AddRequest, SaveCache, SaveProgress
from radixserve.runner.startup import start_executor
from radixserve.sampling_params import SamplingParams
from radixserve.tiers.disk_store import DiskStore

CAPACITY_BYTES = 4 * 2**30
NUM_STEPS = 5  # of each kind in a round: a save of the prompt takes longer


class ForgetfulStore(DiskStore):
    """A DiskStore to which all blocks have other names once round_number is another."""

    round_number = 0

    def contains(self, name: bytes) -> bool:
        return super().contains(self._renamed(name))

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        super().write([self._renamed(name) for name in names], blocks)

    def _renamed(self, name: bytes) -> bytes:
        return self.round_number.to_bytes(4, "little") + name[4:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="sequences that generate")
    parser.add_argument("--prompt", type=int, default=800, help="tokens of the prompt whose blocks are saved")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where blocks are written; left out: a temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        print(msgspec.json.encode(measure(arguments, Path(directory))).decode())


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return what is printed."""
    config = EngineConfig(threads=arguments.threads)
    started = start_executor(config, show_progress=False)
    store = ForgetfulStore(directory, started.bytes_per_block, CAPACITY_BYTES, bytes(32))
    cache = KVCache(started.num_blocks, config.block_size, CacheSettings(store=store))
    limits = SchedulerLimits(
        max_num_seqs=64, max_num_batched_tokens=512, max_model_len=started.max_model_len, end_token_ids=frozenset()
    )
    core = EngineCore(started.executor, load_tokenizer(config), cache, limits, max_queued_requests=64)
    rng = random.Random(0)
    core.add(new_request(rng, "saved", arguments.prompt, 1))
    while core.has_work:
        core.step()
    for row in range(arguments.rows):
        core.add(new_request(rng, str(row), 20, 1000))
    for _ in range(NUM_STEPS):
        core.step()
    without, beside, num_written = [], [], 0
    for store.round_number in range(1, arguments.rounds + 1):
        without += [seconds_of_a_step(core) for _ in range(NUM_STEPS)]
        before = store.stats().num_written_blocks
        save(core)
        beside += [seconds_of_a_step(core) for _ in range(NUM_STEPS)]
        num_written += store.stats().num_written_blocks - before
        while not save(core).is_done:
            core.step()
    core.close()
    return {
        "benchmark": "tier_steps",
        "rows": arguments.rows,
        "threads": arguments.threads,
        "load_average": os.getloadavg()[0],
        "num_steps": len(beside),
        "without_ms": figures(without),
        "beside_a_save_ms": figures(beside),
        "ratio_of_medians": round(statistics.median(beside) / statistics.median(without), 3),
        "num_blocks_written": num_written,
    }


def new_request(rng: random.Random, name: str, num_tokens: int, num_generated: int) -> AddRequest:
    """Return a greedy request of random tokens."""
    prompt = array("i", (rng.randrange(100, 40_000) for _ in range(num_tokens)))
    params = SamplingParams(temperature=0.0, max_tokens=num_generated, ignore_eos=True)
    return AddRequest(name, prompt.tobytes(), params)


def save(core: EngineCore) -> SaveProgress:
    """Begin a save, or go on with it."""
    progress = core.control(SaveCache())
    assert isinstance(progress, SaveProgress)
    assert progress.error is None, progress.error
    return progress


def seconds_of_a_step(core: EngineCore) -> float:
    """Run a step and return how long it took."""
    began = time.perf_counter()
    core.step()
    return time.perf_counter() - began


def figures(seconds: list[float]) -> dict[str, float]:
    """Return the median and the least, in milliseconds."""
    return {"median": round(1e3 * statistics.median(seconds), 3), "min": round(1e3 * min(seconds), 3)}


if __name__ == "__main__":
    main()

"""How much longer does a step take while blocks go to a disk and come from it?

    python benchmarks/tier_step_time.py --rows 8 --repeat 10
    python benchmarks/tier_step_time.py --directory /mnt/nvme/cache

Steps of an engine in which all rows generate, in turn with the disk tier idle and busy: a save is under way all the
time, which copies up to 2 MiB of blocks out of the pool in each step, and what was written is read back and verified.
Prints one JSON line: medians of the step time of both kinds, of their round-by-round ratios, and MB/s written and read.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from generating_engine import generating_engine

from radixserve.core.block_store import NAME_BYTES, BlockBytes, BlockStore, ReadDone
from radixserve.engine.client import THREAD_ENVIRONMENT
from radixserve.protocol import SaveCache, SaveProgress, TierStats
from radixserve.tiers.disk_store import DiskStore

DISK_BYTES = 4 * 2**30
NUM_READ_AT_ONCE = 8
NUM_WARM_UP_STEPS = 3


class BusyStore(BlockStore):
    """A store that holds nothing to the engine, so that each save writes everything again, and reads what it wrote."""

    def __init__(self, disk: DiskStore) -> None:
        self._disk = disk
        self._numbers = itertools.count()
        self._written: list[bytes] = []
        self.is_reading = False

    @property
    def block_bytes(self) -> int:
        return self._disk.block_bytes

    @property
    def num_pending_writes(self) -> int:
        return self._disk.num_pending_writes

    @property
    def num_pending_reads(self) -> int:
        return self._disk.num_pending_reads

    @property
    def seconds_per_block(self) -> float | None:
        return self._disk.seconds_per_block

    def contains(self, name: bytes) -> bool:
        return False

    def has_room(self, num_blocks: int) -> bool:
        return self._disk.has_room(num_blocks)

    def write(self, names: Sequence[bytes], blocks: BlockBytes) -> None:
        new_names = [next(self._numbers).to_bytes(NAME_BYTES, "little") for _ in names]
        self._disk.write(new_names, blocks)
        self._written = [*self._written, *new_names][-64:]

    def read(self, ticket: int, names: Sequence[bytes]) -> None:
        self._disk.read(ticket, names)

    def completed(self) -> list[ReadDone]:
        self._disk.completed()
        if self.is_reading and not self._disk.num_pending_reads:
            self._disk.read(0, self._written[:NUM_READ_AT_ONCE])
        return []

    def forget(self, owner: bytes) -> None:
        self._disk.forget(owner)

    def stats_of_stores(self) -> list[TierStats]:
        return [self._disk.stats()]

    def stats(self) -> TierStats:
        return self._disk.stats()

    def close(self, timeout: float) -> None:
        self._disk.close(timeout)


class EngineSteps:
    """An engine whose requests all generate, num_rows of them, until num_steps steps were run."""

    def __init__(self, directory: Path, num_rows: int, context: int, num_steps: int) -> None:
        self._num_rows = num_rows
        self.store: BusyStore

        def make_store(block_bytes: int) -> BusyStore:
            self.store = BusyStore(DiskStore(directory, block_bytes, DISK_BYTES, bytes(32)))
            return self.store

        self._core = generating_engine(num_rows, context, num_steps, make_store=make_store)

    def run(self, num_steps: int, *, is_busy: bool) -> float:
        """Return the median of the steps' times in milliseconds."""
        self.store.is_reading = is_busy
        times = []
        for _ in range(num_steps):
            if is_busy:
                progress = self._core.control(SaveCache(begins=False))
                assert isinstance(progress, SaveProgress)
                if progress.is_done:
                    self._core.control(SaveCache())
            began = time.perf_counter()
            output = self._core.step()
            times.append((time.perf_counter() - began) * 1e3)
            assert len(output.deltas) == self._num_rows, "a request has ended, so this step is of fewer rows"
        return statistics.median(times)

    def settle(self) -> None:
        """Let the disk's threads finish, so that they are in no idle step."""
        while self.store.num_pending_writes or self.store.num_pending_reads:
            self.store.is_reading = False
            self.store.completed()
            time.sleep(0.01)


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    num_steps = NUM_WARM_UP_STEPS + 2 * arguments.repeat * arguments.steps
    engine = EngineSteps(directory, arguments.rows, arguments.context, num_steps)
    engine.run(NUM_WARM_UP_STEPS, is_busy=True)
    engine.settle()
    idle, busy, written, read, seconds = [], [], 0, 0, 0.0
    for _ in range(arguments.repeat):
        idle.append(engine.run(arguments.steps, is_busy=False))
        before, began = engine.store.stats(), time.perf_counter()
        busy.append(engine.run(arguments.steps, is_busy=True))
        seconds += time.perf_counter() - began
        after = engine.store.stats()
        written += after.num_written_blocks - before.num_written_blocks
        read += after.num_read_blocks - before.num_read_blocks
        engine.settle()
    ratios = [b / a for a, b in zip(idle, busy, strict=True)]
    engine.store.close(60)
    return {
        "rows": arguments.rows,
        "context": arguments.context,
        "idle_ms": statistics.median(idle),
        "busy_ms": statistics.median(busy),
        "busy_to_idle": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "written_mb_per_s": written * engine.store.block_bytes / seconds / 1e6,
        "read_mb_per_s": read * engine.store.block_bytes / seconds / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind in a repeat")
    parser.add_argument("--directory", type=Path, help="where the disk tier lies; left out: a temporary one")
    arguments = parser.parse_args()
    if not THREAD_ENVIRONMENT.keys() & os.environ.keys():  # it is read when the library is loaded
        os.execve(sys.executable, sys.orig_argv, os.environ | THREAD_ENVIRONMENT)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        document = measure(arguments, Path(directory))
    document |= {"repeat": arguments.repeat, "steps": arguments.steps, "threads": torch.get_num_threads()}
    print(msgspec.json.encode(document | {"load_average": os.getloadavg()}).decode())


if __name__ == "__main__":
    main()

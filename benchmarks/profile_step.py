"""Where does the time of a decode step go? Times steps of the demo model and prints torch's table of operators.

    python benchmarks/profile_step.py --rows 8 --context 1300 --dtype float32

Prints one JSON line with the median and the fastest step in milliseconds, then the operators by their own CPU time.
"""

import argparse
import os
import statistics
import time
from array import array

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from radixserve.config import EngineConfig
from radixserve.core.batch import SampleSlot, ScheduledBatch, ScheduledRow
from radixserve.runner.startup import start_executor
from radixserve.sampling_params import SamplingParams

NUM_WARM_UP_STEPS = 3


def decode_batch(num_rows: int, context_length: int, block_size: int) -> ScheduledBatch:
    """Return a step in which each row computes the last token of a context in blocks of its own."""
    blocks_per_row = -(-context_length // block_size)
    params = SamplingParams(temperature=0.0)
    slot = SampleSlot(params, 0, 0, array("i", [1] * context_length), context_length)
    return ScheduledBatch(
        [
            ScheduledRow(
                array("i", [1]),
                context_length - 1,
                array("i", range(row * blocks_per_row, (row + 1) * blocks_per_row)),
                (slot,),
            )
            for row in range(num_rows)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1300)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    arguments = parser.parse_args()
    config = EngineConfig()
    batch = decode_batch(arguments.rows, arguments.context, config.block_size)
    num_blocks = arguments.rows * len(batch.rows[0].block_table)
    settings = {"dtype": arguments.dtype, "attention_backend": arguments.attention_backend}
    config = EngineConfig.from_settings(settings | {"num_kv_blocks": num_blocks, "max_model_len": arguments.context})
    started = start_executor(config, show_progress=False)
    executor = started.executor
    for _ in range(NUM_WARM_UP_STEPS):
        executor.execute(batch)
    times = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        executor.execute(batch)
        times.append((time.perf_counter() - began) * 1e3)
    document = {
        "rows": arguments.rows,
        "context": arguments.context,
        "weights": started.weights_dtype,
        "kv_cache": started.kv_cache_dtype,
        "attention": started.attention_backend,
        "steps": arguments.steps,
        "step_ms": statistics.median(times),
        "fastest_ms": min(times),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }
    print(msgspec.json.encode(document).decode())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_WARM_UP_STEPS):
            executor.execute(batch)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10, max_name_column_width=50))


if __name__ == "__main__":
    main()

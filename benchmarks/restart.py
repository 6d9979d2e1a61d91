"""What does a server find again after a clean stop and a start, and how much sooner is its first token?

    python benchmarks/restart.py --repeat 3
    python benchmarks/restart.py -- --dtype float32

Starts `radixserve serve` with --kv-cache-dir in a new folder, runs the workload *agents* and some prompts of 1,500
tokens that nothing shares, stops it, and does the same again with the same text. What follows -- goes to both servers.
Prints one JSON line for each repeat, which has text of its own: cached tokens of *agents* before and after, and the
times to the first token of the long prompts, cold and found again.
"""

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixserve.bench.own_server import own_server
from radixserve.bench.report import Figures
from radixserve.bench.serve import NoProgress, Plan, describe_environment, run_benchmark
from radixserve.bench.server import Server
from radixserve.bench.workloads import AGENTS, Workload
from radixserve.errors import ConfigError, ServerCallFailed

LONG = Workload(
    name="long",
    purpose="prompts of 1,500 tokens, one after another",
    num_sessions=5,
    concurrency=1,
    num_turns=1,
    shared_tokens=0,
    first_tokens=1500,
    next_tokens=0,
    output_tokens=8,
)


async def run_both(url: str, seed: int) -> tuple[Figures, Figures]:
    """Run *agents* and the long prompts against one server, and return their figures."""
    figures = []
    async with Server(url) as server:
        for workload in (AGENTS, LONG):
            report = await run_benchmark(server, Plan(workload=workload, seed=seed), NoProgress())
            figures.append(report.repeats[0].figures)
    agents, long = figures
    if agents.num_failed or long.num_failed:
        raise ServerCallFailed("some requests failed, so the figures say nothing")
    return agents, long


def measure(seed: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one start, stop and start."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for _ in range(2):
            with own_server(["--kv-cache-dir", folder, *flags]) as server:
                runs.append(asyncio.run(run_both(server.url, seed)))
        num_bytes = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.is_file())
    (agents, cold), (agents_again, warm) = runs
    if not (agents.cached_tokens and agents_again.cached_tokens and cold.ttft_p50_ms and warm.ttft_p50_ms):
        raise ServerCallFailed("the server told no cached tokens, or no token came")
    return {
        "agents_cached_tokens": [agents.cached_tokens, agents_again.cached_tokens],
        "agents_found_again": agents_again.cached_tokens / agents.cached_tokens,
        "agents_computed_tokens": [agents.computed_tokens, agents_again.computed_tokens],
        "agents_wall_seconds": [agents.wall_seconds, agents_again.wall_seconds],
        "long_cached_tokens": [cold.cached_tokens, warm.cached_tokens],
        "long_ttft_ms": [cold.ttft_p50_ms, warm.ttft_p50_ms],
        "long_ttft_cold_to_warm": cold.ttft_p50_ms / warm.ttft_p50_ms,
        "directory_mib": num_bytes / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("serve", nargs="*", metavar="-- FLAGS", help="flags and model of radixserve serve")
    arguments = parser.parse_args()
    for repeat in range(arguments.repeat):
        load = os.getloadavg()
        try:
            document = measure(arguments.seed + repeat, arguments.serve)
        except (ConfigError, ServerCallFailed) as error:
            raise SystemExit(f"restart: {error}") from None
        environment = msgspec.to_builtins(describe_environment()) | {"load_average": load}
        document = {"seed": arguments.seed + repeat, "serve": arguments.serve, **document, **environment}
        print(msgspec.json.encode(document).decode(), flush=True)


if __name__ == "__main__":
    main()

"""`radixserve bench serve`: a workload against a running server."""

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from radixserve.bench.report import Report, render, to_json
from radixserve.bench.serve import Plan, run_benchmark
from radixserve.bench.server import Server
from radixserve.bench.workloads import WORKLOADS
from radixserve.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; return 1 if a request failed.

    Raises ServerCallFailed if the server cannot be reached, ConfigError if the JSON file cannot be written.
    """
    if arguments.json is not None:
        _check_writable(arguments.json)
    plan = Plan(
        workload=WORKLOADS[arguments.workload],
        # A fixed default would repeat the prompts of an earlier run, which the server may still have in its cache.
        seed=secrets.randbelow(2**32) if arguments.seed is None else arguments.seed,
        model=arguments.model,
        num_repeats=arguments.repeat,
        same_prompts=arguments.same_prompts,
    )
    report = asyncio.run(_measure(Server(arguments.base_url, arguments.api_key), plan))
    Console(highlight=False, soft_wrap=True).print(render(report))
    if arguments.json is not None:
        arguments.json.write_bytes(to_json(report))
    return 1 if report.num_failed else 0


async def _measure(server: Server, plan: Plan) -> Report:
    is_shown = sys.stderr.isatty()
    async with server:
        with tqdm(desc=plan.workload.name, unit=" tokens", disable=not is_shown, leave=False) as bar:
            return await run_benchmark(server, plan, bar)


def _check_writable(file: Path) -> None:
    """Raise ConfigError before the measurement rather than an error after it."""
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json: cannot write {file}: {error.strerror}") from None

"""How do servers compare on the same workloads? Measures each in turn: A B C, A B C, ...

    python benchmarks/compare.py --workload "single agents" --repeat 5 --serve llama.cpp=http://127.0.0.1:8081/v1,4711
    python benchmarks/compare.py --workload agents cache=http://127.0.0.1:8001/v1 none=http://127.0.0.1:8002/v1

--serve starts `radixserve serve` and measures it first. A server is NAME=URL, with its process as NAME=URL,PID if it
is to be stopped (SIGSTOP, and all processes below it) while another is measured, and with a model id behind that where
the server lists none. Each round sends the same new text to every server. Each workload becomes one JSON document, with
every round's figures, their medians, p10 and p90, and the same of the round-by-round ratios to the first server; in
--results DIR as DATE-MACHINE-WORKLOAD.json, else printed as a line.
"""

import argparse
import os
import random
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from radixserve.bench.comparison import Comparison, ComparisonPlan, compare
from radixserve.bench.measured_server import MeasuredServer, parse_server
from radixserve.bench.own_server import own_server
from radixserve.bench.workloads import WORKLOADS, Workload
from radixserve.errors import ConfigError

MAX_SETTLE_SECONDS = 3600.0


def result_name(comparison: Comparison) -> str:
    """Return the file name of a comparison's document."""
    return f"{comparison.environment.date[:10]}-{comparison.machine}-{comparison.workload.name}.json"


def _split(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--serve is {flags!r}: {error}") from None


def _workloads(text: str) -> list[Workload]:
    try:
        return [WORKLOADS[name] for name in text.split()]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is none of {', '.join(WORKLOADS)}") from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="NAME=URL[,PID][,MODEL]")
    parser.add_argument("--serve", nargs="?", const="", metavar="FLAGS", help="start radixserve with these flags")
    parser.add_argument(
        "--workload", type=_workloads, default=" ".join(WORKLOADS), metavar="NAMES", help="default: %(default)s"
    )
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--settle",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="watch the load before a run (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="of the first round's text; drawn anew unless given")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where documents go; left out: printed")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores", help="name in results (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.servers and options.serve is None:
        parser.error("name a server, or start one with --serve")
    if options.repeat < 1:
        parser.error("--repeat is below 1")
    if not options.workload:
        parser.error(f"--workload names none of {', '.join(WORKLOADS)}")
    if not 0 <= options.settle <= MAX_SETTLE_SECONDS:
        parser.error(f"--settle is {options.settle}; it must be 0 to {MAX_SETTLE_SECONDS:g} seconds")
    return options


def measure(options: argparse.Namespace, servers: Sequence[MeasuredServer], serve_flags: Sequence[str]) -> None:
    """Compare the servers on each workload in turn, and write or print each document as soon as there is one."""

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def write(comparison: Comparison) -> None:
        if options.results is not None:
            document = msgspec.json.format(msgspec.json.encode(comparison), indent=2)
            (options.results / result_name(comparison)).write_bytes(document + b"\n")

    for workload in options.workload:
        plan = ComparisonPlan(
            workload=workload,
            servers=servers,
            num_rounds=options.repeat,
            seed=random.randrange(10**6) if options.seed is None else options.seed,
            machine=options.machine,
            serve_flags=serve_flags,
            settle_seconds=options.settle,
        )
        comparison = compare(plan, tell, write)
        if options.results is None:
            print(msgspec.json.encode(comparison).decode())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    options = _parse(arguments)
    try:
        servers = [parse_server(server) for server in options.servers]
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
        if options.serve is None:
            measure(options, servers, ())
        else:
            flags = _split(options.serve)
            with own_server(flags) as started:
                measure(options, [started, *servers], flags)
    except ConfigError as error:
        raise SystemExit(f"compare: {error}") from None


def exit_when_told() -> None:
    """Let signals end the program by an exception, so that stopped servers go on and the one it started ends."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


if __name__ == "__main__":
    exit_when_told()
    main()

"""How do servers compare on one workload? Runs `radixserve bench serve` against each in turn: A B C, A B C, ...

    python benchmarks/compare.py --workload agents --repeat 5 cache=http://127.0.0.1:8001/v1 none=http://127.0.0.1:8002/v1

Each round sends the same new text to every server. Prints one JSON line: for each server the median, p10 and p90 of its
figures over the rounds, and for each but the first the median of the round-by-round ratio to the first.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixserve.bench.report import percentile

FIGURES = (
    "wall_seconds",
    "output_tokens_per_second",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
)


def run_once(url: str, workload: str, seed: int, extra: Sequence[str]) -> dict[str, Any]:
    """Return the JSON report of one run of the workload."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "radixserve", "bench", "serve", "--base-url", url, "--workload", workload]
        subprocess.run(
            [*command, "--seed", str(seed), "--json", str(report), *extra], check=True, stdout=subprocess.DEVNULL
        )
        document: dict[str, Any] = msgspec.json.decode(report.read_bytes())
    return document


def spread(values: list[float]) -> dict[str, float]:
    """Return median, p10 and p90."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 10),
        "p90": percentile(values, 90),
    }


def summarize(reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return each server's figures, and the ratios of their wall times to the first server's in the same round."""
    figures = {
        name: {
            figure: spread([run["summary"][figure]["median"] for run in runs])
            for figure in FIGURES
            if all(run["summary"].get(figure) for run in runs)
        }
        for name, runs in reports.items()
    }
    walls = {name: [run["summary"]["wall_seconds"]["median"] for run in runs] for name, runs in reports.items()}
    first, *others = reports
    ratios = {
        name: spread([other / base for other, base in zip(walls[name], walls[first], strict=True)]) for name in others
    }
    return {"figures": figures, f"wall_seconds_over_{first}": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--workload", default="agents")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, help="of the first round's text; drawn anew unless given")
    parser.add_argument("--model", help="model id, for servers that do not list one")
    arguments = parser.parse_args()
    servers = dict(server.split("=", 1) for server in arguments.servers)
    extra = ["--model", arguments.model] if arguments.model else []
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for round_number in range(arguments.repeat):
        for name, url in servers.items():
            reports[name].append(run_once(url, arguments.workload, seed + round_number, extra))
    one = reports[next(iter(servers))]
    document = {
        "workload": one[0]["workload"],
        "n": arguments.repeat,
        "seed": seed,
        "environment": one[0]["environment"],
        "load_average_at_end": one[-1]["environment"]["load_average"],
        "versions": {name: runs[0]["server_version"] for name, runs in reports.items()},
        "notes": {name: runs[0]["notes"] for name, runs in reports.items()},
        **summarize(reports),
    }
    print(msgspec.json.encode(document).decode())


if __name__ == "__main__":
    main()

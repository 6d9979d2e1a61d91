"""Which eviction policy finds most of recorded requests, and how far is it from the best that there could be?

    python benchmarks/eviction_policies.py synthetic_trace.jsonl sessions.jsonl gpt-4o-airline.json
    python benchmarks/eviction_policies.py --cross-check synthetic_trace.jsonl sessions.jsonl

Replays each trace, whose format its content tells, under each policy through the cache that the engine runs on, and
writes a Markdown table. Coding-agent sessions go 8, 16 and 32 side by side. All figures are counts, the same on every
machine. --cross-check: the same for parts of the traces, and for their sessions in other orders, 32 side by side.
"""

import argparse
import gzip
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from radixserve.replay.optimum import look_ahead
from radixserve.replay.read import read_trace
from radixserve.replay.replay import POLICIES
from radixserve.replay.report import measure
from radixserve.replay.trace import Trace

CAPACITIES = (500_000, 1_000_000, 2_000_000, 4_000_000, 10_000_000)
# Conversations in text are shorter by far, and an id is a token.
TEXT_CAPACITIES = (16_384, 32_768, 65_536, 131_072)
SLOTS = (8, 16, 32)
MOST_SLOTS = 32

Record = dict[str, Any]
Choice = Callable[[list[Record]], list[Record]]
PARTS: dict[str, Choice] = {
    "every other one": lambda records: records[::2],
    "the second half": lambda records: records[len(records) // 2 :],
}
# For sessions only: requests with times of their own have one order.
ORDERS: dict[str, Choice] = {
    "shuffled, seed 1": lambda records: random.Random(1).sample(records, len(records)),
    "shuffled, seed 2": lambda records: random.Random(2).sample(records, len(records)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path)
    parser.add_argument("--cross-check", action="store_true", help="replay variants of the traces instead")
    arguments = parser.parse_args()
    policies = " | ".join(POLICIES)
    amplifications = " | ".join(f"{policy} misses, of the optimum's" for policy in POLICIES)
    print(f"| trace | sessions side by side | capacity, tokens | {policies} | optimum | {amplifications} |")
    print("|---" * (4 + 2 * len(POLICIES)) + "|")
    for file in arguments.traces:
        if arguments.cross_check:
            print_variants(file)
        else:
            print_rows(file.name, file, SLOTS)


def print_variants(file: Path) -> None:
    """Print the rows of the trace's parts, and of other orders of its sessions."""
    has_sessions = read_trace(file, MOST_SLOTS).num_sessions is not None
    for name, choose in (PARTS | ORDERS if has_sessions else PARTS).items():
        with tempfile.TemporaryDirectory() as directory:
            print_rows(f"{file.name}, {name}", write_variant(file, choose, Path(directory)), (MOST_SLOTS,))


def print_rows(name: str, file: Path, slots: tuple[int, ...]) -> None:
    """Print a row for each number of sessions side by side and each capacity."""
    for trace in traces_of(file, slots):
        uses = look_ahead(trace)
        for capacity_tokens in TEXT_CAPACITIES if trace.tokens_per_id == 1 else CAPACITIES:
            all_figures = list(measure(trace, uses, policies=POLICIES, capacity_tokens=capacity_tokens))
            rates = [figures.hit_rate for figures in all_figures] + [all_figures[0].optimum_hit_rate]
            cells = [name, str(trace.num_sessions or ""), f"{capacity_tokens:,}"]
            cells += [f"{rate:.3f}".removeprefix("0") for rate in rates]
            cells += [f"{figures.miss_amplification:.2f}" for figures in all_figures]
            print(f"| {' | '.join(cells)} |", flush=True)


def traces_of(file: Path, slots: tuple[int, ...]) -> Iterator[Trace]:
    """Yield the trace once, coding-agent sessions for each number of them side by side."""
    trace = read_trace(file, MOST_SLOTS)
    if trace.num_sessions is None or trace.tokens_per_id == 1:
        yield trace
    else:
        yield from (read_trace(file, num_slots) for num_slots in slots)


def write_variant(file: Path, choose: Choice, directory: Path) -> Path:
    """Write the chosen ones of a trace's lines, or list items, into a file in the directory."""
    content = file.read_bytes()
    text = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode()
    written = directory / file.name
    if text.startswith("["):
        written.write_text(json.dumps(choose(json.loads(text))))
    else:
        records = choose([json.loads(line) for line in text.splitlines()])
        written.write_text("\n".join(map(json.dumps, records)))
    return written


if __name__ == "__main__":
    main()

"""`radixserve bench replay`: a trace through the cache alone."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.replay.optimum import look_ahead
from radixserve.replay.read import read_trace
from radixserve.replay.replay import POLICIES
from radixserve.replay.report import ReplayFigures, measure

DEFAULT_SESSIONS = 32


def run(arguments: argparse.Namespace) -> int:
    """Replay the trace at each capacity under each policy; print a JSON line for each as it is known, or one table.

    Raises ConfigError if the trace cannot be read, a request does not fit, or there is no such policy.
    """
    policies = arguments.policy or [EngineConfig().eviction_policy]
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policy is {policy!r}; it must be {' or '.join(POLICIES)}")
    trace = read_trace(Path(arguments.trace), arguments.sessions or DEFAULT_SESSIONS)
    if trace.num_sessions is None and arguments.sessions is not None:
        print("radixserve: --sessions has no effect: the trace says when each request came", file=sys.stderr)
    uses = look_ahead(trace)
    all_figures = []
    for capacity_tokens in arguments.capacity_tokens:
        for figures in measure(trace, uses, policies=policies, capacity_tokens=capacity_tokens):
            all_figures.append(figures)
            if arguments.json:
                print(msgspec.json.encode(figures).decode(), flush=True)
    if not arguments.json:
        num_tokens = trace.num_ids * trace.tokens_per_id
        title = f"{trace.name}: {len(trace.requests):,} requests of {num_tokens:,} tokens"
        if trace.num_sessions is not None:
            title += f", {trace.num_sessions} sessions side by side"
        Console(highlight=False, soft_wrap=True).print(_table(title, all_figures))
    return 0


def _table(title: str, all_figures: list[ReplayFigures]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy", min_width=max(map(len, POLICIES)))
    columns = ("capacity, tokens", "hit rate", "optimum", "infinite", "miss amplification", "prefill amplification")
    for column in columns:
        table.add_column(column, justify="right")
    for figures in all_figures:
        rates = (figures.hit_rate, figures.optimum_hit_rate, figures.infinite_hit_rate)
        amplifications = (figures.miss_amplification, figures.prefill_amplification)
        table.add_row(
            figures.policy,
            f"{figures.capacity_tokens:,}",
            *(f"{rate:.3f}" for rate in rates),
            *(f"{one:.2f}" for one in amplifications),
        )
    return table

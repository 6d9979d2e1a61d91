"""Figures of a run out of its records, and the report: a JSON document and a table."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from radixserve.bench.client import RequestRecord
from radixserve.bench.workloads import Workload


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a workload showed. Times in milliseconds where the name says so.

    A failed request counts in num_failed alone. num_not_sent: later turns of a session whose earlier turn failed.
    tpot_p50_ms: time per output token after an answer's first one, the median over answers. Token counts are None where
    the server did not report them for every request; of answers that come whole, TTFT and times between tokens are.
    """

    num_requests: int
    num_completed: int
    num_failed: int
    num_not_sent: int
    wall_seconds: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    tpot_p50_ms: float | None
    latency_p50_ms: float | None
    output_tokens: int
    output_tokens_per_second: float
    prompt_tokens: int | None
    cached_tokens: int | None
    computed_tokens: int | None


class RequestRow(msgspec.Struct, frozen=True):
    """One request in the JSON document."""

    session: int
    turn: int
    ttft_ms: float | None
    latency_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    finish_reason: str | None
    error: str | None


class Repeat(msgspec.Struct, frozen=True):
    """One run of the workload."""

    figures: Figures
    requests: list[RequestRow]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when it was measured. load_average: over 1, 5 and 15 minutes, before the first request."""

    date: str
    radixserve: str
    commit: str | None
    python: str
    platform: str
    cpu_count: int | None
    load_average: list[float] | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document. summary: median, p10 and p90 of each figure over the repeats."""

    workload: Workload
    base_url: str
    model: str
    seed: int
    same_prompts: bool
    exact_prompt_lengths: bool
    environment: Environment
    server_version: Any
    notes: list[str]
    summary: dict[str, dict[str, float]]
    repeats: list[Repeat]

    @property
    def num_failed(self) -> int:
        """Failed requests of all repeats."""
        return sum(repeat.figures.num_failed for repeat in self.repeats)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of at least one value, linear between the two nearest."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def compute_figures(records: Sequence[RequestRecord], num_requests: int, wall_seconds: float) -> Figures:
    """Return the figures of one run. records: of the requests that were sent, out of num_requests planned."""
    completed = [record for record in records if record.error is None]
    ttft = [record.ttft * 1e3 for record in completed if record.ttft is not None]
    gaps = [gap * 1e3 for record in completed for gap in record.gaps]
    # Of an answer's tokens and not its chunks, as a server may put several tokens in a chunk.
    tpot = [
        sum(record.gaps) * 1e3 / (record.output_tokens - 1)
        for record in completed
        if record.gaps and record.output_tokens > 1
    ]
    output_tokens = sum(record.output_tokens for record in completed)
    prompt_tokens = _sum_if_all(completed, lambda record: record.prompt_tokens)
    cached_tokens = _sum_if_all(completed, lambda record: record.cached_tokens)
    computed_tokens = None if prompt_tokens is None or cached_tokens is None else prompt_tokens - cached_tokens
    return Figures(
        num_requests=num_requests,
        num_completed=len(completed),
        num_failed=len(records) - len(completed),
        num_not_sent=num_requests - len(records),
        wall_seconds=wall_seconds,
        ttft_p50_ms=percentile(ttft, 50) if ttft else None,
        ttft_p95_ms=percentile(ttft, 95) if ttft else None,
        itl_p50_ms=percentile(gaps, 50) if gaps else None,
        itl_p95_ms=percentile(gaps, 95) if gaps else None,
        tpot_p50_ms=percentile(tpot, 50) if tpot else None,
        latency_p50_ms=percentile([record.latency * 1e3 for record in completed], 50) if completed else None,
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / wall_seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        computed_tokens=computed_tokens,
    )


def _sum_if_all(records: Sequence[RequestRecord], count: Callable[[RequestRecord], int | None]) -> int | None:
    counts = [count(record) for record in records]
    known = [number for number in counts if number is not None]
    return sum(known) if known and len(known) == len(counts) else None


def make_repeat(records: Sequence[RequestRecord], num_requests: int, wall_seconds: float) -> Repeat:
    """Return figures and rows of one run."""
    rows = [
        RequestRow(
            record.session,
            record.turn,
            None if record.ttft is None else record.ttft * 1e3,
            record.latency * 1e3,
            record.prompt_tokens,
            record.cached_tokens,
            record.output_tokens,
            record.finish_reason,
            record.error,
        )
        for record in records
    ]
    return Repeat(compute_figures(records, num_requests, wall_seconds), rows)


_SPREAD = {"median": 50, "p10": 10, "p90": 90}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, p10 and p90 of at least one value."""
    return {label: percentile(values, percent) for label, percent in _SPREAD.items()}


def summarize(runs: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Return median, p10 and p90 over the runs of each figure that all of them know."""
    summary = {}
    for name in Figures.__struct_fields__:
        values = [getattr(figures, name) for figures in runs]
        if values and None not in values:
            summary[name] = spread(values)
    return summary


_ROWS = (
    ("TTFT p50", "ttft_p50_ms", "ms"),
    ("TTFT p95", "ttft_p95_ms", "ms"),
    ("inter-token latency p50", "itl_p50_ms", "ms"),
    ("inter-token latency p95", "itl_p95_ms", "ms"),
    ("time per output token p50", "tpot_p50_ms", "ms"),
    ("whole answer p50", "latency_p50_ms", "ms"),
    ("output tokens/s", "output_tokens_per_second", ""),
    ("output tokens", "output_tokens", ""),
    ("prompt tokens", "prompt_tokens", ""),
    ("  cached", "cached_tokens", ""),
    ("  computed", "computed_tokens", ""),
    ("wall time", "wall_seconds", "s"),
    ("requests completed", "num_completed", ""),
    ("requests failed", "num_failed", ""),
)


def render(report: Report) -> RenderableType:
    """Return the report as a table for a terminal: medians over the repeats, and their spread if there are several."""
    workload = report.workload
    repeats = f"{len(report.repeats)} repeat{'s' if len(report.repeats) > 1 else ''}"
    table = Table(title=f"{workload.name}: {workload.purpose}", title_justify="left")
    table.add_column("figure")
    table.add_column("median" if len(report.repeats) > 1 else "value", justify="right")
    if len(report.repeats) > 1:
        table.add_column("p10", justify="right")
        table.add_column("p90", justify="right")
    for label, name, unit in _ROWS:
        spread = report.summary.get(name)
        if spread is None:
            cells = ["not reported"]
        else:
            labels = list(_SPREAD) if len(report.repeats) > 1 else ["median"]
            cells = [_cell(spread[label], unit) for label in labels]
        table.add_row(label, *cells)
    lines = [f"{report.model} at {report.base_url}, seed {report.seed}, {repeats}", *report.notes]
    return Group(table, *(Text(line) for line in lines))


def _cell(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if float(value).is_integer() and not unit else f"{value:,.2f}"
    return f"{number} {unit}".rstrip()


def to_json(report: Report) -> bytes:
    """Return the report as an indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"

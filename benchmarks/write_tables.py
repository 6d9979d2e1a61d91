"""Write the tables of README.md and docs/BENCHMARKS.md, and docs/benchmarks.svg, from what compare.py has measured.

    python benchmarks/write_tables.py

All three depend on the comparisons in benchmarks/results alone: of the machine that was measured last, the last one of
each workload. What stands between two marker comments is written anew. Without a comparison nothing is changed.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import msgspec

from radixserve.bench.comparison import Comparison, ServerResult
from radixserve.bench.workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- make bench writes what stands from here -->"
END = "<!-- to here -->"


class Row(msgspec.Struct, frozen=True):
    """A line of the README's table. decimals: of its numbers. is_rate: more is better."""

    workload: str
    label: str
    figure: str
    unit: str
    decimals: int = 1
    is_rate: bool = False


ROWS = (
    Row("single", "128 tokens in, 128 out", "output_tokens_per_second", "tokens/s", is_rate=True),
    Row("single", "from token to token", "itl_p50_ms", "ms"),
    Row("agents", "8 agents, 6 steps, one system prompt", "wall_seconds", "s"),
    Row("agents", "prompt tokens computed", "computed_tokens", "", decimals=0),
    Row("burst", "32 requests, 16 at a time", "wall_seconds", "s"),
    Row("turns", "2 sessions, 8 turns behind 4,000 tokens", "wall_seconds", "s"),
    Row("turns", "to the first token of a turn", "ttft_p50_ms", "ms", decimals=0),
    Row("beam", "8 beam searches of width 4", "wall_seconds", "s"),
)
# Heading, figure, decimals of the long tables' columns.
COLUMNS = (
    ("wall time, s", "wall_seconds", 1),
    ("output tokens/s", "output_tokens_per_second", 1),
    ("TTFT p50, ms", "ttft_p50_ms", 0),
    ("TTFT p95, ms", "ttft_p95_ms", 0),
    ("inter-token p50, ms", "itl_p50_ms", 1),
    ("time per output token p50, ms", "tpot_p50_ms", 1),
    ("whole answer p50, ms", "latency_p50_ms", 0),
    ("prompt tokens", "prompt_tokens", 0),
    ("cached", "cached_tokens", 0),
    ("computed", "computed_tokens", 0),
)


def read_comparisons(folder: Path) -> list[Comparison]:
    """Return the comparisons in a folder, in which other benchmarks' documents lie too."""
    comparisons = []
    for file in sorted(folder.glob("*.json")):
        document = msgspec.json.decode(file.read_bytes())
        if isinstance(document, dict) and "baseline" in document:
            comparisons.append(msgspec.convert(document, Comparison))
    return comparisons


def choose(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the last comparison of each workload on the machine that was measured last, in the workloads' order."""
    in_time = sorted(comparisons, key=lambda comparison: comparison.environment.date)
    last = {one.workload.name: one for one in in_time if one.machine == in_time[-1].machine}
    return [last[name] for name in WORKLOADS if name in last]


def server_names(comparisons: Sequence[Comparison]) -> list[str]:
    """Return all servers, each once, the baseline first."""
    return list(dict.fromkeys(chain.from_iterable(comparison.servers for comparison in comparisons)))


def short_table(comparisons: Sequence[Comparison]) -> str:
    """Return the README's table, with a column a server."""
    names = server_names(comparisons)
    by_workload = {comparison.workload.name: comparison for comparison in comparisons}
    lines = [_line(["", *names]), _line(["---"] * (len(names) + 1))]
    for row in ROWS:
        comparison = by_workload.get(row.workload)
        if comparison is not None:
            lines.append(_line([f"*{row.workload}*: {row.label}", *_cells(row, comparison, names)]))
    image = f"![Wall time of each server over that of {names[0]}](docs/benchmarks.svg)"
    return "\n\n".join([conditions(comparisons), "\n".join(lines), *_told(comparisons), image])


def _cells(row: Row, comparison: Comparison, names: Sequence[str]) -> list[str]:
    """The median of each server, the best one in bold, and its ratio to the baseline's."""
    results = [comparison.servers.get(name) for name in names]
    medians = [_median(result, row.figure) for result in results]
    known = [median for median in medians if median is not None]
    best = (max if row.is_rate else min)(known, default=None)
    cells = []
    for result, median in zip(results, medians, strict=True):
        if result is None or median is None:
            cells.append("-" if result is None or not result.figures else "not reported")
            continue
        number = f"{median:,.{row.decimals}f} {row.unit}".rstrip()
        ratio = result.ratios.get(row.figure)
        cells.append((f"**{number}**" if median == best else number) + (f" ({ratio['median']:.2f}x)" if ratio else ""))
    return cells


def _median(result: ServerResult | None, figure: str) -> float | None:
    found = None if result is None else result.figures.get(figure)
    return None if found is None else found["median"]


def long_tables(comparisons: Sequence[Comparison]) -> str:
    """Return a table for each workload, with a row a server, for docs/BENCHMARKS.md."""
    parts = [conditions(comparisons), *filter(None, [_versions(comparisons)])]
    for comparison in comparisons:
        columns = [
            column
            for column in COLUMNS
            if any(_median(result, column[1]) is not None for result in comparison.servers.values())
        ]
        head = ["server", *(heading for heading, _, _ in columns), f"wall time over {comparison.baseline}'s"]
        lines = [_line(head), _line(["---"] * len(head))]
        for name, result in comparison.servers.items():
            if not result.figures:
                continue
            medians = [(_median(result, figure), decimals) for _, figure, decimals in columns]
            cells = ["not reported" if median is None else f"{median:,.{places}f}" for median, places in medians]
            lines.append(_line([name, *cells, _spread_of_ratio(result)]))
        parts += [f"*{comparison.workload.name}*: {comparison.workload.purpose}.", "\n".join(lines)]
    return "\n\n".join([*parts, *_told(comparisons, with_notes=True)])


def _versions(comparisons: Sequence[Comparison]) -> str:
    """What each server said of itself, once."""
    lines = []
    for name in server_names(comparisons):
        results = [comparison.servers[name] for comparison in comparisons if name in comparison.servers]
        models = _each(Path(result.model).name for result in results if result.model is not None)
        versions = _each(_version_text(result.version) for result in results)
        if models:
            lines.append(f"- {name}: {models}{f', version {versions}' if versions else ''}")
    return "\n".join(lines)


def _spread_of_ratio(result: ServerResult) -> str:
    ratio = result.ratios.get("wall_seconds")
    return f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})" if ratio else ""


def _version_text(version: Any) -> str:
    """Return what a server answered to /version, in words; servers wrap it in {"version": ...} as a rule."""
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        return str(version["version"])
    return msgspec.json.encode(version).decode() if version else ""


def conditions(comparisons: Sequence[Comparison]) -> str:
    """Say when, where, of what and at what load the comparisons were measured."""
    environments = [comparison.environment for comparison in comparisons]
    runs = [run for comparison in comparisons for result in comparison.servers.values() for run in result.rounds]
    loads = [run.load.load_average for run in runs]
    busy = [run.load.busy_cores for run in runs if run.load.busy_cores is not None]
    flags = _each(" ".join(comparison.serve_flags) for comparison in comparisons)
    text = (
        f"Measured {_each(one.date[:10] for one in environments)} on {comparisons[0].machine} "
        f"({_each(one.platform for one in environments)}), commit "
        f"{_each((one.commit or 'unknown')[:7] for one in environments)}{f' with {flags}' if flags else ''}. "
        f"Medians; rounds: {_each(str(comparison.num_rounds) for comparison in comparisons)}, the servers in turn in "
        f"each. In brackets the median ratio to {comparisons[0].baseline}, round by round."
    )
    if loads:
        text += f" Load average before a run: {min(loads):.1f} to {max(loads):.1f}, the run before it included"
        text += f"; cores busy in the second before it: at most {max(busy):.2f}." if busy else "."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _each(words: Iterable[str]) -> str:
    return " and ".join(sorted({word for word in words if word}))


def _told(comparisons: Sequence[Comparison], *, with_notes: bool = False) -> list[str]:
    """Say which servers were skipped, and which rounds failed, and the notes of runs; nothing if there were none."""
    lines = []
    for comparison in comparisons:
        for name, result in comparison.servers.items():
            failures = [run.error for run in result.rounds if run.error is not None]
            where = f"- *{comparison.workload.name}*, {name}:"
            if result.skipped is not None:
                lines.append(f"{where} skipped, {result.skipped}")
            lines += [f"{where} {note}" for note in result.notes if with_notes]
            if failures:
                lines.append(f"{where} {len(failures)} of {len(result.rounds)} rounds failed, first by: {failures[0]}")
    return ["\n".join(lines)] if lines else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# Pixels. LEFT holds the servers' names, RIGHT what stands behind the longest bar.
WIDTH, LEFT, RIGHT = 860, 190, 150
BAR, GAP, GROUP = 16, 6, 34
BLUE, SILVER, GREY, INK = "#2563eb", "#b6bdc8", "#57606a", "#1f2328"


def plot(comparisons: Sequence[Comparison]) -> str:
    """Return bars of wall time over the baseline's as an SVG document, a group for each workload."""
    baseline = comparisons[0].baseline
    groups = [(comparison, _bars(comparison)) for comparison in comparisons]
    longest = max((ratio for _, bars in groups for _, ratio, _ in bars), default=1.0)
    title = f"Wall time over that of {baseline}: shorter is better"
    body, y = [_text(16, 28, title, size=16, weight="bold")], 44
    for comparison, bars in groups:
        y += GROUP
        body.append(
            _text(16, y - 10, f"{comparison.workload.name}: {comparison.workload.purpose}", size=12, colour=GREY)
        )
        for name, ratio, seconds in bars:
            length = max(1.0, ratio / longest * (WIDTH - LEFT - RIGHT))
            colour = BLUE if name == baseline else SILVER
            body.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            body.append(_text(LEFT - 8, y + 12, name, size=12, anchor="end"))
            label = f"{seconds:,.1f} s" + ("" if name == baseline else f", {ratio:.2f}x")
            body.append(_text(int(LEFT + length) + 8, y + 12, label, size=12))
            y += BAR + GAP
    height = y + 12
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{escape(title)}</title>",
            # A ground of its own, so that it can be read on a dark page too.
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _bars(comparison: Comparison) -> list[tuple[str, float, float]]:
    """Name, ratio to the baseline and seconds of each server that was measured beside it."""
    bars = []
    for name, result in comparison.servers.items():
        seconds = _median(result, "wall_seconds")
        ratio = 1.0 if name == comparison.baseline else result.ratios.get("wall_seconds", {}).get("median")
        if seconds is not None and ratio is not None:
            bars.append((name, ratio, seconds))
    return bars


def _text(x: int, y: int, words: str, *, size: int, colour: str = INK, **more: str) -> str:
    names = {"weight": "font-weight", "anchor": "text-anchor"}
    extra = "".join(f' {names[key]}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{extra}>{escape(words)}</text>'


def replace_block(text: str, block: str) -> str:
    """Return text with block between the two markers. Raises ValueError if they do not stand there once each."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the text must hold {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


WRITERS: dict[str, Callable[[Sequence[Comparison], str], str]] = {
    "README.md": lambda comparisons, text: replace_block(text, short_table(comparisons)),
    "docs/BENCHMARKS.md": lambda comparisons, text: replace_block(text, long_tables(comparisons)),
    "docs/benchmarks.svg": lambda comparisons, _: plot(comparisons),
}


def write(root: Path) -> None:
    """Write all three below root, from its benchmarks/results."""
    comparisons = choose(read_comparisons(root / "benchmarks" / "results"))
    if not comparisons:
        return
    for name, written in WRITERS.items():
        path = root / name
        path.write_text(written(comparisons, path.read_text() if path.exists() else ""))


if __name__ == "__main__":
    write(ROOT)

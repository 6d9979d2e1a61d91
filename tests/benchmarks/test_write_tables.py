"""The README's table is a function of the results."""

import random
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.write_tables import (
    BEGIN,
    END,
    choose,
    long_tables,
    plot,
    read_comparisons,
    replace_block,
    short_table,
    write,
)
from radixserve.bench.comparison import Comparison, Load, Round, ServerResult, summarize_servers
from radixserve.bench.report import Environment, Figures
from radixserve.bench.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def figures_of(wall: float, **more: float | None) -> Figures:
    counts = {"num_requests": 1, "num_completed": 1, "num_failed": 0, "num_not_sent": 0, "output_tokens": 128}
    times = dict.fromkeys(("ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "tpot_p50_ms"), wall * 10)
    tokens = {"prompt_tokens": 158, "cached_tokens": 24, "computed_tokens": 134}
    whole = {**counts, **times, **tokens, "latency_p50_ms": wall * 1e3, "output_tokens_per_second": 128 / wall}
    return Figures(**{**whole, "wall_seconds": wall, **more})  # type: ignore[arg-type]


def comparison_of(
    workload: str = "single",
    servers: dict[str, ServerResult] | None = None,
    *,
    date: str = "2026-01-02",
    machine: str = "2-cores",
) -> Comparison:
    comparison = Comparison(
        workload=WORKLOADS[workload],
        baseline="radixserve",
        num_rounds=3,
        seed=1,
        machine=machine,
        environment=Environment(
            date=f"{date}T10:00:00+00:00",
            radixserve="0.1.0",
            commit="abcdef0123",
            python="3.11",
            platform="Linux",
            cpu_count=2,
            load_average=None,
        ),
        serve_flags=["--dtype", "float32"],
        servers=servers or {"radixserve": measured(2.0, 2.0, 4.0), "other": measured(4.0, 8.0, 4.0)},
    )
    summarize_servers(comparison)
    return comparison


def measured(*walls: float | None, **more: float | None) -> ServerResult:
    rounds = [
        Round(Load(0.5, 0.01), figures_of(wall, **more)) if wall else Round(Load(1.5, 0.02), error="it broke off")
        for wall in walls
    ]
    return ServerResult(url="http://127.0.0.1:1/v1", rounds=rounds)


def cells_of(table: str, beginning: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_cell_is_the_median_with_its_ratio_and_the_best_is_bold() -> None:
    table = short_table([comparison_of("agents")])
    assert cells_of(table, "*agents*: 8 agents") == ["**2.0 s**", "4.0 s (2.00x)"]
    assert cells_of(table, "*agents*: prompt tokens computed") == ["**134**", "**134** (1.00x)"]


def test_the_best_rate_is_the_highest() -> None:
    assert cells_of(short_table([comparison_of()]), "*single*: 128") == [
        "**64.0 tokens/s**",
        "32.0 tokens/s (0.50x)",
    ]


def test_a_server_that_was_skipped_or_failed_is_told_and_has_no_figure() -> None:
    servers = {
        "radixserve": measured(1.0, 1.0),
        "without": ServerResult(url="", skipped="no beam search: unknown field"),
        "broken": measured(None, None),
        "shaken": measured(None, 3.0),
    }
    for table in (short_table([comparison_of("beam", servers)]), long_tables([comparison_of("beam", servers)])):
        assert "- *beam*, without: skipped, no beam search: unknown field" in table
        assert "- *beam*, broken: 2 of 2 rounds failed, first by: it broke off" in table
        assert "- *beam*, shaken: 1 of 2 rounds failed" in table
    assert cells_of(short_table([comparison_of("beam", servers)]), "*beam*") == ["**1.0 s**", "-", "-", "3.0 s (3.00x)"]


def test_a_count_that_a_server_does_not_report_is_told_as_such() -> None:
    servers = {"radixserve": measured(1.0), "other": measured(1.0, computed_tokens=None)}
    comparison = comparison_of("agents", servers)
    assert cells_of(short_table([comparison]), "*agents*: prompt tokens computed")[1] == "not reported"
    assert "not reported" in cells_of(long_tables([comparison]), "other")


def test_the_long_tables_tell_notes_models_and_versions() -> None:
    servers = {"radixserve": measured(1.0), "other": measured(1.0)}
    servers["other"].notes = ["2 of 2 answers are shorter than 128 tokens."]
    servers["other"].model, servers["other"].version = "/models/demo", {"version": "9.9"}
    comparisons = [comparison_of("single", servers), comparison_of("burst", servers)]
    told = long_tables(comparisons)
    assert "- *single*, other: 2 of 2 answers are shorter" in told
    assert told.count("- other: demo, version 9.9") == 1
    assert "shorter" not in short_table(comparisons)


def test_a_server_that_one_workload_lacks_has_a_column_all_the_same() -> None:
    single = comparison_of("single", {"radixserve": measured(1.0)})
    table = short_table([single, comparison_of("burst")])
    assert cells_of(table, "*single*: from") == ["**10.0 ms**", "-"]
    assert "| other |" in table


def test_the_last_comparison_of_each_workload_on_the_last_machine_is_told() -> None:
    old, new = comparison_of(date="2026-01-02"), comparison_of(date="2026-01-09")
    burst = comparison_of("burst", date="2026-01-01")
    elsewhere = comparison_of("turns", date="2026-01-05", machine="64-cores")
    assert choose([new, burst, elsewhere, old]) == [new, burst]
    assert choose([]) == []


def test_load_date_commit_and_flags_are_told() -> None:
    table = " ".join(short_table([comparison_of(servers={"radixserve": measured(1.0, None)})]).split())
    for words in ("2026-01-02", "2-cores", "abcdef0", "--dtype float32", "rounds: 3", "0.5 to 1.5", "at most 0.02"):
        assert words in table


def test_tables_and_plot_depend_on_the_results_and_not_on_their_order() -> None:
    comparisons = [comparison_of(name) for name in WORKLOADS]
    shuffled = random.Random(0).sample(comparisons, len(comparisons))
    for function in (short_table, long_tables, plot):
        assert function(choose(shuffled)) == function(choose(comparisons))


def test_a_bar_is_as_long_as_the_wall_time_over_the_baselines() -> None:
    servers = {"radixserve": measured(2.0), "a<b": measured(6.0), "skipped": ServerResult(url="", skipped="no")}
    tree = ElementTree.fromstring(plot([comparison_of("burst", servers)]))
    _, mine, other = [float(bar.attrib["width"]) for bar in tree.iter(f"{SVG}rect")]
    assert other == pytest.approx(3 * mine, abs=0.2)
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert "2.0 s" in texts
    assert "6.0 s, 3.00x" in texts
    assert "a<b" in texts
    assert "skipped" not in texts


def test_every_bar_and_label_lies_within_the_plot() -> None:
    servers = {"radixserve": measured(2.0), "a server": measured(97.0)}
    tree = ElementTree.fromstring(plot([comparison_of(name, servers) for name in WORKLOADS]))
    width, height = float(tree.attrib["width"]), float(tree.attrib["height"])
    for bar in tree.iter(f"{SVG}rect"):
        assert float(bar.get("x", 0)) + float(bar.attrib["width"]) <= width
        assert float(bar.get("y", 0)) + float(bar.attrib["height"]) <= height
    for text in tree.iter(f"{SVG}text"):
        half_an_em = float(text.attrib["font-size"]) * 0.55
        long = half_an_em * len(text.text or "")
        left = float(text.attrib["x"]) - (long if text.get("text-anchor") == "end" else 0)
        assert left >= 0
        assert left + long <= width


def test_what_stands_around_the_marks_stays() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = replace_block(text, "new")
    assert re.fullmatch(rf"before\n{BEGIN}\s+new\s+{END}\nafter\n", new)
    assert replace_block(new, "new") == new


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_text_without_the_two_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        replace_block(text, "new")


def test_other_documents_among_the_results_are_passed_over(tmp_path: Path) -> None:
    comparison = comparison_of()
    (tmp_path / "comparison.json").write_bytes(msgspec.json.encode(comparison))
    (tmp_path / "other.json").write_text('{"width": 6}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "lines.jsonl").write_text("{}\n{}\n")
    assert read_comparisons(tmp_path) == [comparison]


def test_readme_documentation_and_plot_are_what_the_results_give(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        (results / file.name).write_bytes(file.read_bytes())
    (tmp_path / "docs").mkdir()
    names = ["README.md", "docs/BENCHMARKS.md", "docs/benchmarks.svg"]
    names = [name for name in names if (ROOT / name).exists()]
    for name in names:
        (tmp_path / name).write_text((ROOT / name).read_text())
    write(tmp_path)
    for name in names:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"run benchmarks/write_tables.py: {name}"


def test_without_a_comparison_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no marks")
    write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]

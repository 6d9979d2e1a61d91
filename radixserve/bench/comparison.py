"""Several servers on one workload, in turn: A B C, A B C, ..."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixserve.bench.measured_server import MeasuredServer, paused
from radixserve.bench.report import Environment, Figures, Report, spread, summarize
from radixserve.bench.serve import NoProgress, Plan, describe_environment, run_benchmark
from radixserve.bench.server import Server
from radixserve.bench.workloads import Workload
from radixserve.errors import ConfigError, NoBeamSearch, ServerCallFailed


class Load(msgspec.Struct, frozen=True):
    """How busy the machine was before a run. load_average: over the last minute, so the run before is in it.

    busy_cores: cores in use during the last second, while nothing was asked of any server; None without /proc.
    """

    load_average: float
    busy_cores: float | None


class Round(msgspec.Struct, frozen=True):
    """One run of one server. figures: None if it failed; error says how."""

    load: Load
    figures: Figures | None = None
    error: str | None = None


class ServerResult(msgspec.Struct):
    """What one server showed.

    skipped: why the workload does not measure it; it then has no more rounds. figures: median, p10 and p90 over its
    rounds. ratios: the same of the quotients to the first server's figures of the same round.
    """

    url: str
    model: str | None = None
    version: Any = None
    skipped: str | None = None
    notes: list[str] = []
    rounds: list[Round] = []
    figures: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}


class Comparison(msgspec.Struct, kw_only=True):
    """The JSON document. baseline: the name of the first server. num_rounds: those that have been run.

    seed: of the first round's text; each round adds one. machine: a name for where it was measured. serve_flags: of the
    radixserve that was started for it.
    """

    workload: Workload
    baseline: str
    num_rounds: int
    seed: int
    machine: str
    environment: Environment
    serve_flags: list[str]
    servers: dict[str, ServerResult]


class ComparisonPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. machine, serve_flags: to be written down.

    settle_seconds: how long the machine is watched before each run. Raises ConfigError if two servers have one name.
    """

    workload: Workload
    servers: Sequence[MeasuredServer]
    num_rounds: int
    seed: int
    machine: str
    serve_flags: Sequence[str] = ()
    settle_seconds: float = 1.0

    def __post_init__(self) -> None:
        names = [server.name for server in self.servers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two servers are named {name}; give each a name of its own")


def compare(
    plan: ComparisonPlan, tell: Callable[[str], object], on_round: Callable[[Comparison], object]
) -> Comparison:
    """Run the plan; tell it in lines as it goes, and hand over what there is after each round.

    Each round sends the same new text to every server. What fails costs its server that round and no other server
    anything; a server without beam search is not asked for it again.
    """
    comparison = Comparison(
        workload=plan.workload,
        baseline=plan.servers[0].name,
        num_rounds=0,
        seed=plan.seed,
        machine=plan.machine,
        environment=describe_environment(),
        serve_flags=list(plan.serve_flags),
        servers={server.name: ServerResult(url=server.url) for server in plan.servers},
    )
    for number in range(plan.num_rounds):
        for server in plan.servers:
            result = comparison.servers[server.name]
            if result.skipped is not None:
                continue
            with paused(other for other in plan.servers if other is not server):
                load = measure_load(plan.settle_seconds)
                tell(f"{plan.workload.name}, round {number + 1} of {plan.num_rounds}, {server.name}: {_in_words(load)}")
                _run(server, Plan(workload=plan.workload, seed=plan.seed + number, model=server.model), load, result)
            tell(f"    {_outcome(result)}")
        comparison.num_rounds += 1
        summarize_servers(comparison)
        on_round(comparison)
    return comparison


def _run(server: MeasuredServer, plan: Plan, load: Load, result: ServerResult) -> None:
    """Measure one server once, and write down what came of it."""
    try:
        report = asyncio.run(_measure(server, plan))
    except NoBeamSearch as error:
        result.skipped = str(error)
    except ServerCallFailed as error:
        result.rounds.append(Round(load, error=str(error)))
    else:
        result.model, result.version = report.model, report.server_version
        result.notes = list(dict.fromkeys([*result.notes, *report.notes]))
        if report.num_failed:
            # The other figures are of less work than the other servers did.
            result.rounds.append(
                Round(load, error=f"{report.num_failed} of {plan.workload.num_requests} requests failed")
            )
        else:
            result.rounds.append(Round(load, report.repeats[0].figures))


async def _measure(server: MeasuredServer, plan: Plan) -> Report:
    async with Server(server.url) as connection:
        return await run_benchmark(connection, plan, NoProgress())


def summarize_servers(comparison: Comparison) -> None:
    """Compute figures and ratios from the rounds, in place."""
    base = comparison.servers[comparison.baseline].rounds
    for name, result in comparison.servers.items():
        result.figures = summarize([one.figures for one in result.rounds if one.figures is not None])
        if name != comparison.baseline:
            result.ratios = _ratios(result.rounds, base)


def _ratios(rounds: Sequence[Round], base: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return the spread of each figure over the base's of the same round, where all such rounds know it."""
    # A server that is skipped has fewer rounds.
    pairs = [(one.figures, other.figures) for one, other in zip(rounds, base, strict=False)]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    ratios = {}
    for name in Figures.__struct_fields__:
        values = [(getattr(one, name), getattr(other, name)) for one, other in both]
        if values and all(value is not None and reference for value, reference in values):
            ratios[name] = spread([value / reference for value, reference in values])
    return ratios


def measure_load(seconds: float) -> Load:
    """Watch the machine for some seconds, which also lets the run before come to rest."""
    before = _busy_seconds()
    started = time.monotonic()
    time.sleep(seconds)
    after = _busy_seconds()
    elapsed = time.monotonic() - started
    busy = None if before is None or after is None or not seconds else round((after - before) / elapsed, 2)
    return Load(round(os.getloadavg()[0], 2), busy)


def _busy_seconds() -> float | None:
    """Return the core seconds that this machine has worked since it started; None where there is no /proc."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except FileNotFoundError:
        return None
    ticks = [int(number) for number in line.split()[1:9]]
    idle, waiting = ticks[3], ticks[4]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def _in_words(load: Load) -> str:
    busy = "" if load.busy_cores is None else f", {load.busy_cores} cores busy"
    return f"load {load.load_average}{busy}"


def _outcome(result: ServerResult) -> str:
    if result.skipped is not None:
        return f"skipped: {result.skipped}"
    figures = result.rounds[-1].figures
    if figures is None:
        return f"failed: {result.rounds[-1].error}"
    return f"{figures.wall_seconds:.2f} s, {figures.output_tokens_per_second:.1f} tokens/s"

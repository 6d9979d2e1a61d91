"""Servers on loopback, measured in turn."""

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
from starlette.responses import JSONResponse

from radixserve.bench.comparison import Comparison, ComparisonPlan, compare, measure_load, summarize_servers
from radixserve.bench.measured_server import MeasuredServer
from radixserve.bench.workloads import BEAM, SINGLE, Workload
from radixserve.errors import ConfigError
from tests.bench.test_measured_server import idle_processes, needs_proc, wait_until
from tests.fake_server import FakeServer, serving

SHORT = msgspec.structs.replace(SINGLE, output_tokens=3)
SHORT_BEAM = msgspec.structs.replace(BEAM, num_sessions=2, output_tokens=3)
NUM_WARM_UP = 1


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    """Three servers that write the bodies they get into one list, in the order in which they came."""
    with ExitStack() as stack:
        fakes = [stack.enter_context(serving(FakeServer())) for _ in range(3)]
        yield fakes


class Run:
    """A comparison of servers a, b and c, whose requests name them as the model; what it told and handed over."""

    def __init__(self, fakes: list[FakeServer], workload: Workload = SHORT, num_rounds: int = 2) -> None:
        self.lines: list[str] = []
        self.after_rounds: list[int] = []
        for fake in fakes:
            fake.bodies = fakes[0].bodies
        plan = ComparisonPlan(
            workload=workload,
            servers=[MeasuredServer(name, fake.url, model=name) for name, fake in zip("abc", fakes, strict=True)],
            num_rounds=num_rounds,
            seed=7,
            machine="test",
            settle_seconds=0,
        )
        self.bodies = fakes[0].bodies
        self.result = compare(plan, self.lines.append, lambda so_far: self.after_rounds.append(so_far.num_rounds))

    def completed(self, name: str) -> list[bool]:
        return [one.figures is not None for one in self.result.servers[name].rounds]


def test_servers_take_turns_in_each_round(fakes: list[FakeServer]) -> None:
    run = Run(fakes)
    assert "".join(body["model"] for body in run.bodies if body["max_tokens"] == 3) == "abcabc"
    assert run.after_rounds == [1, 2]


def test_a_round_sends_the_same_new_text_to_every_server(fakes: list[FakeServer]) -> None:
    measured = [body["messages"][0]["content"] for body in Run(fakes).bodies if body["max_tokens"] == 3]
    assert measured[0] == measured[1] == measured[2] != measured[3] == measured[4] == measured[5]


def test_the_load_is_told_before_every_run_and_kept(fakes: list[FakeServer]) -> None:
    run = Run(fakes)
    assert ["load" in line for line in run.lines] == [True, False] * 6
    assert all(one.load.load_average >= 0 for server in run.result.servers.values() for one in server.rounds)


def test_a_machine_that_was_not_watched_has_no_number_of_busy_cores() -> None:
    assert measure_load(0).busy_cores is None


def test_a_server_that_fails_costs_no_other_server_a_figure(fakes: list[FakeServer]) -> None:
    for fake in fakes:
        fake.bodies = fakes[0].bodies
    # Each run is a warm-up and a request; the third and fourth are those of b.
    fakes[1].failing_calls = {4: JSONResponse({"error": {"message": "no room"}}, status_code=500)}
    run = Run(fakes)
    assert [run.completed(name) for name in "abc"] == [[True, True], [False, True], [True, True]]
    assert run.result.servers["b"].rounds[0].error == "1 of 1 requests failed"
    assert any("no room" in note for note in run.result.servers["b"].notes)
    assert run.result.servers["b"].figures["num_completed"]["median"] == 1


def test_a_server_that_is_not_there_costs_no_other_server_a_figure(fakes: list[FakeServer]) -> None:
    with serving(FakeServer()) as gone:
        pass
    run = Run([fakes[0], gone, fakes[2]])
    assert [run.completed(name) for name in "abc"] == [[True, True], [False, False], [True, True]]
    assert "cannot reach" in str(run.result.servers["b"].rounds[1].error)
    assert run.result.servers["b"].figures == run.result.servers["b"].ratios == {}
    assert "wall_seconds" in run.result.servers["c"].ratios


def test_a_server_without_beam_search_is_skipped_with_a_note_and_asked_no_more(fakes: list[FakeServer]) -> None:
    fakes[1].searches_beams = False
    run = Run(fakes, SHORT_BEAM)
    assert [run.completed(name) for name in "abc"] == [[True, True], [], [True, True]]
    assert "no beam search" in str(run.result.servers["b"].skipped)
    assert sum(body["model"] == "b" for body in run.bodies) == NUM_WARM_UP + 1
    assert any(line.strip().startswith("skipped: no beam search") for line in run.lines)


@needs_proc
def test_all_other_servers_stand_still_while_one_is_measured(fakes: list[FakeServer]) -> None:
    with idle_processes(2) as pids:
        servers = [
            MeasuredServer(name, fake.url, pid) for name, fake, pid in zip("abc", fakes, [*pids, None], strict=True)
        ]
        measured = iter("abcabc")

        def check(line: str) -> None:
            if "load" in line:
                name = next(measured)
                assert f"{name}: load" in line
                for server in servers[:2]:
                    assert server.pid is not None
                    wait_until(server.pid, stopped=server.name != name)

        plan = ComparisonPlan(workload=SHORT, servers=servers, num_rounds=2, seed=1, machine="test", settle_seconds=0)
        compare(plan, check, lambda _: None)
        assert not list(measured)
        for pid in pids:
            wait_until(pid, stopped=False)


def test_ratios_are_of_the_same_round_and_leave_out_rounds_that_either_lost(fakes: list[FakeServer]) -> None:
    result = Run(fakes, num_rounds=3).result
    walls = {"a": [1.0, 10.0, 100.0], "b": [2.0, 20.0, None], "c": [None, 30.0, 500.0]}
    for name, seconds in walls.items():
        rounds = result.servers[name].rounds
        for number, wall in enumerate(seconds):
            figures = rounds[number].figures
            assert figures is not None
            changed = None if wall is None else msgspec.structs.replace(figures, wall_seconds=wall)
            rounds[number] = msgspec.structs.replace(rounds[number], figures=changed)
    summarize_servers(result)
    assert result.servers["a"].ratios == {}
    assert result.servers["b"].ratios["wall_seconds"] == {"median": 2.0, "p10": 2.0, "p90": 2.0}
    assert result.servers["c"].ratios["wall_seconds"]["median"] == 4.0
    assert result.servers["c"].figures["wall_seconds"]["median"] == 265.0


def test_a_figure_that_the_base_lacks_has_no_ratio(fakes: list[FakeServer]) -> None:
    fakes[0].reports_cached = False
    servers = Run(fakes).result.servers
    assert "cached_tokens" not in servers["b"].ratios
    assert "computed_tokens" not in servers["b"].ratios
    assert "prompt_tokens" in servers["b"].ratios


def test_a_comparison_survives_json(fakes: list[FakeServer]) -> None:
    result = Run(fakes).result
    assert msgspec.json.decode(msgspec.json.encode(result), type=Comparison) == result


def test_two_servers_of_one_name_are_a_config_error() -> None:
    server = MeasuredServer("a", "http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="named a"):
        ComparisonPlan(workload=SINGLE, servers=[server, server], num_rounds=1, seed=1, machine="test")

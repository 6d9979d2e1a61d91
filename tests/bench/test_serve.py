"""The benchmark against a server on loopback that counts in a way known to the test."""

import asyncio
import itertools
import json
from collections.abc import Iterator

import pytest
from starlette.responses import JSONResponse

from radixserve.bench.client import RequestRecord, measure
from radixserve.bench.report import Report
from radixserve.bench.serve import Plan, run_benchmark
from radixserve.bench.server import Server
from radixserve.bench.workloads import AGENTS, BEAM, BURST, SINGLE, TURNS, Workload
from radixserve.errors import ConfigError, NoBeamSearch, ServerCallFailed
from tests.fake_server import FakeServer, num_tokens_of, serving

SMALL_AGENTS = Workload(
    name="agents",
    purpose="",
    num_sessions=3,
    concurrency=3,
    num_turns=4,
    shared_tokens=40,
    first_tokens=10,
    next_tokens=6,
    output_tokens=5,
)
NUM_WARM_UP = 1


class CountingProgress:
    def __init__(self) -> None:
        self.total: float | None = None
        self.seen: float = 0

    def reset(self, total: float | None = None) -> None:
        self.total = total

    def update(self, n: float | None = 1) -> None:
        self.seen += n or 0


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def run(fake: FakeServer, workload: Workload, progress: CountingProgress | None = None, **plan: object) -> Report:
    async def body() -> Report:
        async with Server(fake.url) as server:
            whole = Plan(workload=workload, **{"seed": 1, **plan})  # type: ignore[arg-type]
            return await run_benchmark(server, whole, progress or CountingProgress())

    return asyncio.run(body())


def measure_one(fake: FakeServer) -> RequestRecord:
    async def body() -> RequestRecord:
        record = RequestRecord(0, 0)
        async with Server(fake.url) as server:
            request = {"model": "fake/model", "messages": [], "max_tokens": 4}
            await measure(server, request, record, lambda _: None)
        return record

    return asyncio.run(body())


def test_prompts_have_exactly_the_length_that_the_server_counts(fake: FakeServer) -> None:
    report = run(fake, SINGLE)
    (message,) = fake.bodies[NUM_WARM_UP]["messages"]
    assert num_tokens_of(message["content"]) == 128
    assert report.exact_prompt_lengths
    assert report.repeats[0].figures.prompt_tokens == 128 + 5


def test_every_request_is_greedy_streamed_and_of_fixed_length(fake: FakeServer) -> None:
    report = run(fake, SINGLE, model="m")
    body = fake.bodies[NUM_WARM_UP]
    assert (body["model"], body["temperature"], body["stream"]) == ("m", 0.0, True)
    assert (body["max_tokens"], body["ignore_eos"]) == (128, True)
    assert report.repeats[0].figures.output_tokens == 128
    assert report.notes == []


def test_an_agent_resends_its_whole_history_with_the_answers(fake: FakeServer) -> None:
    run(fake, SMALL_AGENTS)
    by_agent: dict[str, list[list[dict[str, str]]]] = {}
    for body in fake.bodies[NUM_WARM_UP:]:
        by_agent.setdefault(body["messages"][1]["content"], []).append(body["messages"])
    assert len(by_agent) == 3
    answer = {"role": "assistant", "content": "Hello there, friendHello"}
    for histories in by_agent.values():
        assert [len(history) for history in histories] == [2, 4, 6, 8]
        for before, after in itertools.pairwise(histories):
            assert after[:-1] == [*before, answer]
            assert after[-1]["role"] == "user"


def test_cached_and_computed_tokens_are_the_servers_own(fake: FakeServer) -> None:
    figures = run(fake, SMALL_AGENTS).repeats[0].figures
    system, task, answer, result = 45, 15, 5 + 5, 11
    histories = [system + task + turn * (answer + result) for turn in range(4)]
    assert figures.prompt_tokens == 3 * sum(histories)
    # Of three agents that start together, those whose first request comes after another's end find the system prompt.
    later_hits = sum(histories[:3])
    assert figures.cached_tokens is not None
    assert (figures.cached_tokens - 3 * later_hits) in {0, system, 2 * system}
    assert figures.computed_tokens == figures.prompt_tokens - figures.cached_tokens


def test_agents_and_burst_send_what_their_names_say(fake: FakeServer) -> None:
    report = run(fake, BURST)
    assert report.repeats[0].figures.num_completed == 32
    assert {num_tokens_of(body["messages"][1]["content"]) for body in fake.bodies[NUM_WARM_UP:]} == {64}
    fake.bodies.clear()
    assert run(fake, AGENTS).repeats[0].figures.output_tokens == 8 * 6 * 32
    assert {num_tokens_of(body["messages"][0]["content"]) for body in fake.bodies[NUM_WARM_UP:]} == {1000}


def test_histories_are_brought_in_before_the_clock_and_are_in_no_figure(fake: FakeServer) -> None:
    report = run(fake, TURNS)
    histories, measured = fake.bodies[NUM_WARM_UP : NUM_WARM_UP + 2], fake.bodies[NUM_WARM_UP + 2 :]
    assert [body["max_tokens"] for body in histories] == [1, 1]
    assert len(measured) == len(report.repeats[0].requests) == 2 * 8
    assert {body["max_tokens"] for body in measured} == {100}
    for body in measured:
        assert body["messages"][:2] in [history["messages"][:2] for history in histories]
    figures = report.repeats[0].figures
    assert figures.output_tokens == 2 * 8 * 100
    # All but the last message of each request, which the request before it or its history has left in the cache.
    last_messages = sum(num_tokens_of(body["messages"][-1]["content"]) + 5 for body in measured)
    later = [body for body in measured if len(body["messages"]) > 3]
    last_answers = sum(num_tokens_of(body["messages"][-2]["content"]) + 5 for body in later)
    assert figures.computed_tokens == last_messages + last_answers


def test_a_history_that_is_refused_is_an_error_of_the_whole_run(fake: FakeServer) -> None:
    fake.failing_calls = {NUM_WARM_UP + 2: JSONResponse({"error": {"message": "too long"}}, status_code=400)}
    with pytest.raises(ServerCallFailed, match="too long"):
        run(fake, TURNS)


def test_a_beam_search_asks_for_all_its_hypotheses_and_counts_their_tokens(fake: FakeServer) -> None:
    progress = CountingProgress()
    report = run(fake, BEAM, progress)
    for body in fake.bodies[NUM_WARM_UP + 1 :]:
        assert (body["use_beam_search"], body["n"], body["max_tokens"]) == (True, 4, 48)
        assert (body["temperature"], body["ignore_eos"]) == (0.0, True)
        assert not body.keys() & {"stream", "stream_options"}
    figures = report.repeats[0].figures
    assert (figures.num_completed, figures.output_tokens) == (8, 8 * 4 * 48)
    assert (figures.ttft_p50_ms, figures.itl_p50_ms, figures.tpot_p50_ms) == (None, None, None)
    assert figures.latency_p50_ms
    assert report.notes == []
    assert progress.total == progress.seen == 8 * 4 * 48


def test_a_failed_beam_search_is_counted(fake: FakeServer) -> None:
    fake.failing_calls = {NUM_WARM_UP + 1 + 3: JSONResponse({"error": {"message": "no room"}}, status_code=503)}
    report = run(fake, BEAM)
    assert (report.num_failed, report.repeats[0].figures.num_completed) == (1, 7)
    assert any("no room" in note for note in report.notes)


def test_a_server_that_ignores_the_field_of_beam_search_is_not_measured_by_it(fake: FakeServer) -> None:
    fake.searches_beams = False
    with pytest.raises(NoBeamSearch, match="one greedy answer"):
        run(fake, BEAM)
    assert len(fake.bodies) == NUM_WARM_UP + 1


def test_a_server_that_refuses_beam_search_is_not_measured_by_it(fake: FakeServer) -> None:
    fake.refused = {"use_beam_search"}
    with pytest.raises(NoBeamSearch, match="unknown field use_beam_search"):
        run(fake, BEAM)


def test_repeats_have_prompts_of_their_own_unless_asked_for_the_same(fake: FakeServer) -> None:
    run(fake, SINGLE, num_repeats=3)
    assert len({body["messages"][0]["content"] for body in fake.bodies[NUM_WARM_UP:]}) == 3
    fake.bodies.clear()
    run(fake, SINGLE, num_repeats=3, same_prompts=True)
    assert len({body["messages"][0]["content"] for body in fake.bodies[NUM_WARM_UP:]}) == 1


def test_the_same_seed_sends_the_same_prompts(fake: FakeServer) -> None:
    prompts = []
    for seed in (3, 3, 4):
        fake.bodies.clear()
        run(fake, SINGLE, seed=seed)
        prompts.append(fake.bodies[NUM_WARM_UP]["messages"])
    assert prompts[0] == prompts[1] != prompts[2]


@pytest.mark.parametrize(
    ("refused", "sent"),
    [
        (set(), {"ignore_eos", "stream_options"}),
        ({"ignore_eos"}, {"generation_config", "stream_options"}),
        ({"ignore_eos", "generation_config"}, {"stream_options"}),
        ({"stream_options"}, {"ignore_eos"}),
        ({"ignore_eos", "generation_config", "stream_options"}, set()),
    ],
)
def test_a_server_that_refuses_a_field_is_asked_without_it(fake: FakeServer, refused: set[str], sent: set[str]) -> None:
    fake.refused = refused
    report = run(fake, SINGLE)
    assert fake.bodies[-1].keys() & {"ignore_eos", "generation_config", "stream_options"} == sent
    assert any("fixes the length" in note for note in report.notes) == ("generation_config" in refused)
    assert any("counted as chunks" in note for note in report.notes) == ("stream_options" in refused)
    assert report.num_failed == 0


def test_transformers_is_asked_for_the_length_in_its_own_way(fake: FakeServer) -> None:
    fake.refused = {"ignore_eos"}
    run(fake, SINGLE)
    assert json.loads(fake.bodies[-1]["generation_config"]) == {"min_new_tokens": 128, "max_new_tokens": 128}


def test_without_usage_chunks_are_counted_and_the_report_says_so(fake: FakeServer) -> None:
    fake.reports_usage = False
    report = run(fake, SINGLE)
    figures = report.repeats[0].figures
    assert (figures.output_tokens, figures.prompt_tokens, figures.cached_tokens) == (128, None, None)
    assert any("counted as chunks" in note for note in report.notes)


def test_short_answers_and_missing_counts_are_reported(fake: FakeServer) -> None:
    fake.refused = {"ignore_eos", "generation_config"}
    fake.reports_cached = fake.has_tokenize = False
    report = run(fake, SINGLE)
    figures = report.repeats[0].figures
    assert (figures.output_tokens, figures.cached_tokens, figures.computed_tokens) == (4, None, None)
    assert figures.prompt_tokens is not None
    assert not report.exact_prompt_lengths
    for words in ("no /tokenize", "1 of 1 answers are shorter", "not report cached"):
        assert any(words in note for note in report.notes), words


def test_first_token_is_timed_from_the_first_text_and_not_from_the_role(fake: FakeServer) -> None:
    fake.delay = 0.05
    record = measure_one(fake)
    assert record.ttft is not None
    assert record.ttft >= 0.05
    assert len(record.gaps) == 3
    assert sum(record.gaps) >= 0.1
    assert record.latency >= record.ttft + sum(record.gaps)


def test_chunks_that_arrive_together_are_no_time_apart(fake: FakeServer) -> None:
    fake.delay, fake.num_chunks_at_once = 0.3, 2  # so long that a busy machine does not make one arrival of both
    gaps = measure_one(fake).gaps
    assert len(gaps) == 3
    assert gaps[0] == gaps[2] == 0.0
    assert gaps[1] > 0


@pytest.mark.parametrize(("workload", "concurrency"), [(SMALL_AGENTS, 3), (BURST, 16)], ids=["agents", "burst"])
def test_no_more_sessions_run_at_once_than_the_workload_says(
    fake: FakeServer, workload: Workload, concurrency: int
) -> None:
    fake.delay, fake.num_chunks_at_once = 0.02, 32
    run(fake, workload)
    assert 1 < fake.most_at_once <= concurrency


def test_no_proxy_of_the_environment_stands_before_a_local_server(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert run(fake, SINGLE).num_failed == 0


def test_a_failed_step_ends_its_agent_and_is_counted_once(fake: FakeServer) -> None:
    fake.failing_calls = {NUM_WARM_UP + 3 + 1: JSONResponse({"error": {"message": "no room"}}, status_code=503)}
    report = run(fake, SMALL_AGENTS)
    figures = report.repeats[0].figures
    assert figures.num_failed == 1
    assert figures.num_completed + figures.num_failed + figures.num_not_sent == 12
    assert figures.num_not_sent >= 1
    assert any("no room" in note for note in report.notes)


def test_a_stream_that_breaks_off_is_a_failure(fake: FakeServer) -> None:
    fake.breaks_off = True
    assert measure_one(fake).error == "the stream ended before the answer did"


def test_an_error_inside_the_stream_is_a_failure(fake: FakeServer) -> None:
    fake.stream_error = "out of memory"
    assert "out of memory" in str(measure_one(fake).error)


def test_progress_counts_up_to_the_announced_total(fake: FakeServer) -> None:
    progress = CountingProgress()
    run(fake, SMALL_AGENTS, progress, num_repeats=2)
    assert progress.total == progress.seen == 2 * 12 * 5


def test_the_report_knows_server_machine_and_workload(fake: FakeServer) -> None:
    report = run(fake, SINGLE, seed=5)
    assert report.server_version == {"version": "9.9"}
    assert (report.seed, report.workload, report.model) == (5, SINGLE, "fake/model")
    assert report.environment.cpu_count


def test_an_unreachable_server_is_named() -> None:
    with serving(FakeServer()) as fake:
        url = fake.url
    fake.url = url
    with pytest.raises(ServerCallFailed, match=r"cannot reach http://127\.0\.0\.1.*is the server running"):
        run(fake, SINGLE)


def test_a_stream_has_a_connection_of_its_own_as_some_servers_close_it_without_a_word(fake: FakeServer) -> None:
    run(fake, SMALL_AGENTS)
    streamed = fake.headers[-SMALL_AGENTS.num_requests :]
    assert {headers["connection"] for headers in streamed} == {"close"}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1"])
def test_a_base_url_that_is_none_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="the base URL"):
        Server(url)

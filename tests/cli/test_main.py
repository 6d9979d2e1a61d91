import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

from radixserve import __version__
from radixserve.cli.main import main
from tests.fake_server import FakeServer, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    for command in ("serve", "chat", "cache", "bench"):
        assert command in output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"radixserve {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--quantization", "int8"], "--quantization is not available yet"),
        (["serve", "--eviction-policy", "lfu"], "lfu is not available yet"),
        (["cache"], "COMMAND"),
        (["cache", "stats", "--base-url", "x"], "the base URL is 'x'"),
        (["cache", "stats", "--watch", "never"], "'never' is no time"),
        (["cache", "stats", "--watch", "0.01"], "below 0.1 seconds"),
        (["cache", "pin", "f", "--ttl", "0"], "'0' is no time"),
        (["cache", "tree", "--depth", "0"], "at least 1"),
        (["serve", "--port", "70000"], "--port is 70000"),
        (["serve", "--nonsense"], "unknown argument --nonsense"),
        (["serve", "a", "b"], "unknown argument b"),
        (["brew"], "'brew'"),
        (["bench"], "BENCHMARK"),
        (["bench", "serve"], "--workload"),
        (["bench", "serve", "--workload", "single", "--repeat", "0"], "below 1"),
        (["bench", "serve", "--workload", "single", "--base-url", "localhost"], "the base URL is 'localhost'"),
        (["bench", "serve", "--workload", "single", "--json", "/nonexistent/x.json"], "/nonexistent/x.json"),
        (["chat", "--model", "m"], "--base-url"),
        (["chat", "--api-key", "k"], "--base-url"),
        (["chat", "m", "--base-url", "http://x"], "MODEL is for a model loaded here"),
        (["chat", "--dtype", "float32", "--base-url", "http://x"], "--dtype is for a model loaded here"),
        (["chat", "--temperature", "3", "--base-url", "http://x"], "temperature is 3"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("radixserve: error: ")
    assert output.err.count("\n") == 1
    assert words in output.err


@pytest.mark.parametrize("command", [["bench", "serve", "--workload", "burst"], ["cache", "stats"], ["chat"]])
def test_an_unreachable_server_is_one_line_and_exit_code_1(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer()) as fake:
        url = fake.url
    assert main([*command, "--base-url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("radixserve: error: cannot reach")
    assert "Connection refused" in error
    assert error.count("\n") == 1


def test_bench_prints_a_table_and_writes_json(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    argv = ["bench", "serve", "--workload", "single", "--base-url", fake.url, "--repeat", "2", "--seed", "5"]
    assert main([*argv, "--api-key", "secret", "--json", str(file)]) == 0
    table = capsys.readouterr().out
    for words in ("TTFT p50", "inter-token latency p95", "output tokens/s", "cached", "fake/model", "seed 5"):
        assert words in table
    report = json.loads(file.read_text())
    assert (report["seed"], report["workload"]["name"], len(report["repeats"])) == (5, "single", 2)
    assert report["summary"]["prompt_tokens"] == {"median": 133, "p10": 133, "p90": 133}
    assert report["repeats"][0]["requests"][0]["output_tokens"] == 128
    assert all(headers["authorization"] == "Bearer secret" for headers in fake.headers)
    assert "secret" not in file.read_text()


def test_bench_without_a_seed_never_sends_the_prompts_of_an_earlier_run(fake: FakeServer) -> None:
    for _ in range(2):
        main(["bench", "serve", "--workload", "single", "--base-url", fake.url])
    _, first, _, second = fake.bodies
    assert first["messages"] != second["messages"]


def test_bench_with_a_failed_request_reports_it_and_ends_with_1(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.failing_calls = {2: JSONResponse({"error": {"message": "queue is full"}}, status_code=429)}
    assert main(["bench", "serve", "--workload", "single", "--base-url", fake.url]) == 1
    assert "queue is full" in capsys.readouterr().out


def test_a_server_that_refuses_the_key_ends_the_benchmark(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.failing_calls = {1: JSONResponse({"error": {"message": "bad key"}}, status_code=401)}
    assert main(["bench", "serve", "--workload", "single", "--base-url", fake.url]) == 1
    assert "answered 401: bad key" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "radixserve", "serve", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()
    assert errors == b""

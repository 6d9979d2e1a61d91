"""The command behind `make bench`, against servers on loopback."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.compare import exit_when_told, main
from radixserve.bench import comparison
from tests.fake_server import FakeServer, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def documents_of(folder: Path) -> dict[str, dict[str, object]]:
    """Documents by workload, which ends their file's name."""
    return {file.stem.rpartition("-")[2]: json.loads(file.read_text()) for file in folder.iterdir()}


def test_each_workload_becomes_a_document_of_its_own(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    where = ["--results", str(folder), "--machine", "box"]
    what = ["--workload", "single beam", "--repeat", "1", "--seed", "5", "--settle", "0"]
    main([*what, *where, f"first={fake.url}", f"second={fake.url}"])
    documents = documents_of(folder)
    assert documents.keys() == {"single", "beam"}
    assert all("-box-" in file.name for file in folder.iterdir())
    single = documents["single"]
    assert (single["baseline"], single["seed"], single["num_rounds"]) == ("first", 5, 1)
    assert list(single["servers"]) == ["first", "second"]
    assert capsys.readouterr().out == ""


def test_without_a_folder_a_document_is_a_line(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--workload", "single", "--repeat", "1", "--settle", "0", f"one={fake.url}"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["workload"]["name"] == "single"


def test_an_interrupted_comparison_leaves_the_rounds_that_were_run(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([comparison.Load(0.0, None)] * 2)

    def interrupt_the_third_run(_: float) -> comparison.Load:
        try:
            return next(loads)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(comparison, "measure_load", interrupt_the_third_run)
    with pytest.raises(KeyboardInterrupt):
        main(["--workload", "single", "--results", str(tmp_path), f"one={fake.url}"])
    assert documents_of(tmp_path)["single"]["num_rounds"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_a_comparison_lets_it_clean_up(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        exit_when_told()
        with pytest.raises(SystemExit):
            signal.raise_signal(number)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a server"),
        (["--workload", "single fast", "a=http://127.0.0.1:1"], "fast"),
        (["--repeat", "0", "a=http://127.0.0.1:1"], "--repeat"),
        (["--workload", "", "a=http://127.0.0.1:1"], "--workload names none"),
        (["--settle", "-1", "a=http://127.0.0.1:1"], "--settle is -1"),
        (["--settle", "nan", "a=http://127.0.0.1:1"], "--settle is nan"),
        (["--serve='unbalanced"], "No closing quotation"),
        (["a"], "NAME=URL"),
        (["--workload", "single", "a=127.0.0.1:1"], "127.0.0.1:1"),
        (["a=http://127.0.0.1:1", "a=http://127.0.0.1:2"], "named a"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert words in f"{ended.value}{capsys.readouterr().err}"


def test_a_server_that_does_not_start_is_quoted() -> None:
    with pytest.raises(SystemExit, match=r"did not start: .* --no-such-flag"):
        main(["--workload", "single", "--serve=--no-such-flag"])

"""The README's quick start, copied out and run against a server of the demo model."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running_server import RunningServer, running_server

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
SNIPPETS = re.findall(r"```(sh|python)\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def run(language: str, code: str, server: RunningServer) -> str:
    command = ["bash", "-ec"] if language == "sh" else [sys.executable, "-c"]
    done = subprocess.run(
        [*command, code.replace(ADDRESS, server.url)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def snippet(word: str) -> tuple[str, str]:
    """Return language and code of the one snippet that holds a word."""
    (found,) = [(language, code) for language, code in SNIPPETS if word in code]
    return found


@pytest.mark.slow
def test_the_curl_command_answers(server: RunningServer) -> None:
    assert "Rome" in run(*snippet("/v1/chat/completions"), server)


@pytest.mark.slow
def test_the_beam_search_command_answers_with_scores_and_blocks(server: RunningServer) -> None:
    answer = json.loads(run(*snippet("/v1/beam_search"), server))
    assert answer["choices"][0]["text"] == "The capital of France is Paris."
    scores = [choice["score"] for choice in answer["choices"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["memory"]["peak_blocks"] < answer["memory"]["peak_blocks_without_sharing"]


@pytest.mark.slow
def test_the_openai_snippet_prints_what_it_says(server: RunningServer) -> None:
    language, code = snippet("for _ in range(2)")
    said = re.findall(r"^# (.*)$", code, re.MULTILINE)
    # Prompts of other tests begin alike, so only the second count is certain.
    printed = run(language, code, server).splitlines()
    assert printed[1] == said[1]
    assert said[0].startswith(printed[0].rpartition(" ")[0])


@pytest.mark.slow
def test_the_snippet_of_structured_output_and_tools_prints_what_it_says(server: RunningServer) -> None:
    language, code = snippet("response_format")
    assert run(language, code, server).splitlines() == re.findall(r"^# (.*)$", code, re.MULTILINE)


@pytest.mark.slow
def test_the_langchain_snippet_streams_an_answer(server: RunningServer) -> None:
    assert run(*snippet("langchain_openai"), server).strip()


@pytest.mark.slow
def test_the_offline_snippet_prints_three_answers(server: RunningServer) -> None:
    assert len(run(*snippet("import LLM"), server).splitlines()) >= 3

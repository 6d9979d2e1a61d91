"""Each demo as a user starts it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agents_demo.shared_prompt_team import ROLES, TASKS
from agents_demo.steps import Summary
from tests.agents_demo.running import address_without_a_server, steps_of
from tests.server.running_server import RunningServer, running_server

DEMOS = ("react_openai", "react_langchain", "tree_of_thought", "shared_prompt_team")


def run(demo: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"agents_demo.{demo}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def base_url(server: RunningServer) -> str:
    """The server with nothing in its cache."""
    assert httpx.post(f"{server.url}/v1/cache/reset").json()["kept_blocks"] == 0
    return f"{server.url}/v1"


def test_every_program_is_documented_and_tested_here() -> None:
    root = Path(__file__).parents[2]
    programs = {path.stem for path in (root / "agents_demo").glob("*.py") if "__main__" in path.read_text()}
    assert programs == set(DEMOS)
    document = (root / "docs" / "AGENTS.md").read_text(encoding="utf-8")
    for demo in DEMOS:
        assert f"python -m agents_demo.{demo} " in document
        assert f"### {demo}\n" in document


@pytest.mark.slow
@pytest.mark.parametrize("demo", DEMOS)
def test_without_a_server_a_demo_says_so_and_fails(demo: str) -> None:
    with address_without_a_server() as base_url:
        done = run(demo, "--base-url", base_url)
    assert done.returncode == 1
    assert done.stderr.startswith(f"no server answers at {base_url} ")
    assert done.stderr.endswith("make serve\n")
    assert not done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_shows_its_steps_and_what_the_cache_saved(demo: str, base_url: str) -> None:
    done = run(demo, "--base-url", base_url)
    assert done.returncode == 0, done.stderr
    steps = steps_of(done.stdout)
    summary = Summary.of(steps, 0.0)
    assert summary.num_steps > 2
    assert done.stdout.splitlines()[0].strip()
    assert f"{summary.num_steps} steps in " in done.stdout
    for line in summary.lines()[1:]:
        assert line in done.stdout
    assert summary.cached_tokens > 0
    if demo == "shared_prompt_team":
        assert summary.num_steps == len(ROLES) * len(TASKS)
        assert summary.late_cached_share >= 0.8
    elif demo == "tree_of_thought":
        assert "The plan is to " in done.stdout
    else:
        assert done.stdout.count("\nA: ") == done.stdout.count("Q: ") == 2

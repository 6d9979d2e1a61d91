"""The search for plans on a stub whose plans have exact scores."""

import math
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO

import pytest
from openai import OpenAI
from rich.console import Console

from agents_demo.steps import StepLog
from agents_demo.tree_of_thought import Search, conclude, grow, main
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.agents_demo.running import steps_of
from tests.background import served_in_background
from tests.byte_tokenizer import END
from tests.stub_engine import stub_engine

TASK = "Plan:\n"
CONCLUSION = "In one sentence, the plan is to"
# The likelier way branches again, the other one is sure of itself.
NEXT_STEPS = {
    "": {"left": 0.6, "right": 0.4},
    "left": {"north": 0.6, "south": 0.4},
    "right": {"onward": 1.0},
}


def planner(context: Sequence[int]) -> Mapping[int, float]:
    """A model that writes one of the next steps, padded to six tokens, or says what the plan is."""
    text = bytes(context).decode("latin-1").rpartition("Plan:\n")[2]
    if CONCLUSION in text:
        said = text.partition(CONCLUSION)[2]
        return {ord(" win.\n"[len(said)]) if len(said) < len(" win.\n") else END: 1.0}
    *steps, said = text.split("\n")
    before = steps[-1].partition(". ")[2].rstrip(".") if steps else ""
    written = said.partition(".")[2]
    wanted: dict[int, float] = {}
    for step, probability in NEXT_STEPS.get(before, {"rest": 1.0}).items():
        line = f" {step}....\n"
        if line.startswith(written) and len(written) < len(line):
            key = ord(line[len(written)])
            wanted[key] = wanted.get(key, 0.0) + probability
    return wanted


@pytest.fixture
def base_url(tokenizer: Tokenizer) -> Iterator[str]:
    with served_in_background(stub_engine(tokenizer, planner, num_blocks=512, max_model_len=2048)) as url:
        yield url


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("keep", "plan", "probability"),
    [
        # One path alone is the likelier first step, with what can follow it.
        (1, "1. left....\n2. north....\n", 0.6 * 0.6),
        # The best plan begins with the less likely step, so both first steps had to be kept.
        (2, "1. right....\n2. onward....\n", 0.4),
    ],
)
def test_the_best_of_the_paths_that_were_kept_wins(client: OpenAI, keep: int, plan: str, probability: float) -> None:
    log = StepLog("", Console(file=StringIO()))
    path = grow(client, "stub", TASK, Search(samples=8, keep=keep, depth=2), log)
    assert path.text == plan
    assert path.logprob == pytest.approx(math.log(probability), abs=1e-4)
    assert path.score == pytest.approx(path.logprob / path.num_tokens)
    assert [step.agent for step in log.steps] == ["path 1", *(f"path {number}" for number in range(1, keep + 1))]


def test_every_sample_but_the_first_finds_its_path_in_the_cache(client: OpenAI) -> None:
    log = StepLog("", Console(file=StringIO()))
    grow(client, "stub", TASK, Search(samples=8, keep=2, depth=2), log)
    first, *others = log.steps
    assert first.cached_tokens == 0
    # A prompt counts once, whatever the number of its samples. New are the number that it ends with, and the sample's
    # last token, whose K/V nothing needed.
    for step in others:
        assert step.computed_tokens <= len("\n2.")


def test_a_beam_search_concludes(client: OpenAI) -> None:
    log = StepLog("", Console(file=StringIO()))
    path = grow(client, "stub", TASK, Search(samples=8, keep=1, depth=1), log)
    assert conclude(client, "stub", TASK, path, log, beam_width=2) == "win."


def test_the_program_prints_table_plan_and_conclusion(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--base-url", base_url, "--samples", "8", "--depth", "2", "--beam-width", "2"])
    output = capsys.readouterr().out
    assert [step.agent for step in steps_of(output)] == ["path 1", "path 1", "path 2", "beam search"]
    assert "4 steps in" in output
    assert output.endswith("The plan is to win.\n")


@pytest.mark.parametrize("flag", ["--samples", "--keep", "--depth", "--beam-width"])
def test_sizes_are_at_least_one(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([flag, "0"])
    assert ended.value.code == 2
    assert "'0' is not an integer of at least 1" in capsys.readouterr().err

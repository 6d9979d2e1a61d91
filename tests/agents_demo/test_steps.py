from io import StringIO

import pytest
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from rich.console import Console

from agents_demo.steps import Step, StepLog


def step(agent: str, number: int, prompt: int, cached: int) -> Step:
    return Step(agent, number, "spoke", prompt, cached, completion_tokens=5, seconds=0.5)


def test_the_summary_adds_up_all_steps_and_looks_at_later_ones_alone() -> None:
    log = StepLog("test", Console(file=StringIO()))
    for entry in (step("a", 1, 100, 0), step("b", 1, 100, 90), step("a", 2, 200, 150)):
        log.add(entry)
    summary = log.summary()
    assert (summary.num_steps, summary.prompt_tokens, summary.cached_tokens) == (3, 400, 240)
    assert summary.completion_tokens == 15
    assert summary.late_cached_share == 0.75
    assert "240 cached (60.0%), 160 computed" in "\n".join(summary.lines())


def test_a_step_takes_its_figures_from_the_usage() -> None:
    log = StepLog("test", Console(file=StringIO()))
    usage = CompletionUsage(
        prompt_tokens=30,
        completion_tokens=4,
        total_tokens=34,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=16),
    )
    log.timer("a", 1)("thought", usage)
    (entry,) = log.steps
    assert (entry.prompt_tokens, entry.cached_tokens, entry.computed_tokens, entry.completion_tokens) == (30, 16, 14, 4)


def test_table_and_summary_are_printed() -> None:
    output = StringIO()
    with StepLog("a title", Console(file=output, width=100)) as log:
        log.add(step("planner", 1, 1234, 34))
    assert "a title" in output.getvalue()
    assert "1,200" in output.getvalue()
    assert "1 steps in" in output.getvalue()


def test_a_run_that_failed_has_no_summary() -> None:
    output = StringIO()

    def run() -> None:
        with StepLog("a title", Console(file=output, width=100)) as log:
            log.add(step("planner", 1, 1234, 34))
            raise ValueError("down")

    with pytest.raises(ValueError, match="down"):
        run()
    assert "steps in" not in output.getvalue()

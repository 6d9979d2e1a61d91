"""The team, against a stub on the loopback interface."""

from collections.abc import Iterator

import pytest

from agents_demo.shared_prompt_team import ROLES, main, system_prompt
from agents_demo.steps import Step
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.agents_demo.running import steps_of
from tests.background import served_in_background
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

REPLIES = {
    "What is your part in it?": "I do my part.",
    "What do you need from the others": "Nothing yet.",
}


@pytest.fixture
def base_url(tokenizer: Tokenizer) -> Iterator[str]:
    config = EngineConfig(max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=1024, max_model_len=4096)
    with served_in_background(engine) as url:
        yield url


@pytest.fixture
def steps(base_url: str, capsys: pytest.CaptureFixture[str]) -> list[Step]:
    """What a whole run of two tasks shows."""
    main(["--base-url", base_url, "--tasks", "2"])
    output = capsys.readouterr().out
    assert "16 steps in" in output
    return steps_of(output)


def test_the_system_prompt_is_computed_once_for_all_members(steps: list[Step]) -> None:
    firsts = {step.agent: step for step in steps if step.number == 1}
    assert firsts.keys() == set(ROLES)
    alone, *others = sorted((step.computed_tokens for step in firsts.values()), reverse=True)
    assert alone > len(system_prompt())
    assert max(others) < 200


def test_a_members_second_turn_finds_its_first_in_the_cache(steps: list[Step]) -> None:
    turns = {(step.agent, step.number): step for step in steps}
    for role in ROLES:
        first, second = turns[role, 1], turns[role, 2]
        assert (first.did, second.did) == ("I do my part.", "Nothing yet.")
        assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 1

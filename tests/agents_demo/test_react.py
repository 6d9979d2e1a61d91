"""Both ReAct loops, against a stub that says what a model might."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from agents_demo import react_langchain, react_openai
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.agents_demo.running import steps_of
from tests.background import served_in_background
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

Main = Callable[[Sequence[str]], None]


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


REPLIES = {
    "How high is it in feet?": call("look_up", topic="everest"),
    "8849 metres high.": call("convert", value=8849, source="metre", target="pound"),
    "error: metre is a length and pound a mass": call("convert", value=8849, source="metre", target="foot"),
    "29032.2 foot": call("answer", text="It is 29032.2 feet high."),
    "How far is it?": call("look_up", topic="moon"),
    "384400 kilometres": call("convert", value=1, source="metre", target="foot").replace("1,", "0." + "3" * 300 + ","),
    "Will you ever answer?": call("look_up", topic="rome"),
    "is the capital of Italy": call("look_up", topic="rome"),
}


@pytest.fixture(params=[react_openai.main, react_langchain.main], ids=["openai", "langchain"])
def main(request: pytest.FixtureRequest) -> Main:
    loop: Main = request.param
    return loop


@pytest.fixture
def base_url(tokenizer: Tokenizer) -> Iterator[str]:
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=1024, max_model_len=8192)
    with served_in_background(engine) as url:
        yield url


def test_an_error_is_told_to_the_model_which_then_finds_the_answer(
    main: Main, base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--base-url", base_url, "--question", "How high is it in feet?"])
    output = capsys.readouterr().out
    assert output.endswith("Q: How high is it in feet?\nA: It is 29032.2 feet high.\n")
    steps = steps_of(output)
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert steps[0].cached_tokens == 0
    for before, step in pairwise(steps):
        # All of the step before, but for its last token, whose K/V nothing needed.
        assert step.cached_tokens >= before.prompt_tokens + before.completion_tokens - 1


def test_a_call_that_is_cut_off_ends_the_loop(main: Main, base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--base-url", base_url, "--question", "How far is it?"])
    output = capsys.readouterr().out
    assert output.endswith("A: none: a call was cut off\n")
    assert [step.did for step in steps_of(output)] == ["look_up(moon)", "was cut off"]


def test_a_model_that_never_answers_must_do_so_in_the_last_step(
    main: Main, base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--base-url", base_url, "--question", "Will you ever answer?", "--max-steps", "3"])
    did = [step.did for step in steps_of(capsys.readouterr().out)]
    assert did[:2] == ["look_up(rome)"] * 2
    assert did[2].startswith("answer(")
    assert len(did) == 3

"""The demo model, small as it is, makes valid calls where it has to make them."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.running_server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
QUESTIONS = ["What is the weather in Paris?", "What is 2 + 40?", "Write a poem about the sea."]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        running_server("--port", "0", "--max-model-len", "2048") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **settings: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=150, **settings)


@pytest.mark.parametrize("name", ["get_weather", "add", None])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_call_that_must_be_made_is_valid(
    client: openai.OpenAI, name: str | None, temperature: int, question: str
) -> None:
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    messages = [{"role": "user", "content": question}]
    answer = ask(client, messages, tool_choice=choice, temperature=temperature, seed=1)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    assert name in (None, call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


def test_a_streamed_call_is_the_plain_one_and_the_next_step_finds_it_in_the_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    settings: dict[str, Any] = {"tool_choice": "required", "temperature": 0}
    plain = ask(client, messages, **settings)
    [call] = plain.choices[0].message.tool_calls
    chunks = list(ask(client, messages, stream=True, **settings))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert len(pieces) > 1
    messages += [plain.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."}]
    usage = ask(client, messages, tool_choice="auto", temperature=0).usage
    assert usage.prompt_tokens_details.cached_tokens >= plain.usage.total_tokens - 1


def test_an_answer_that_need_not_call_is_text_or_calls(client: openai.OpenAI) -> None:
    answer = ask(client, [{"role": "user", "content": QUESTIONS[1]}], temperature=0).choices[0]
    if answer.message.tool_calls is None:
        assert answer.message.content
        assert answer.finish_reason in ("stop", "length")
    else:
        assert answer.finish_reason == "tool_calls"

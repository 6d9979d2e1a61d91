"""Tools through the openai package, against a server on the loopback interface."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import served
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


REPLIES = {
    "1 + 20?": "Let me add.\n" + tagged("plus", '{"a": 1, "b": 20}'),
    "1 + 20 and 2 + 3?": tagged("plus", '{"a": 1, "b": 20}') + "\n" + tagged("plus", '{"a": 2, "b": 3}'),
    "21\n</tool_response>": "It is 21.",
    "Hello?": "Hi.",
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "plus",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture
async def base_url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=512, max_model_len=4096)
    async with served(engine) as url:
        yield f"{url}/v1"


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


async def test_a_conversation_with_a_tool(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "1 + 20?"}]
    first = await client.chat.completions.create(model="stub", messages=messages, tools=[TOOL])
    [choice] = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me add.")
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 20}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    second = await client.chat.completions.create(model="stub", messages=messages, tools=[TOOL])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 21.", "stop")
    # The call's own text included: what was generated is what the next prompt holds.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


@pytest.mark.parametrize("question", ["1 + 20?", "1 + 20 and 2 + 3?", "Hello?"])
async def test_tc_3_the_clients_own_accumulation_of_a_stream_is_the_plain_answer(
    client: openai.AsyncOpenAI, question: str
) -> None:
    request: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": question}], "tools": [TOOL]}
    async with client.chat.completions.stream(**request) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    plain = (await client.chat.completions.create(**request)).choices[0]
    assert streamed.finish_reason == plain.finish_reason
    assert streamed.message.content == plain.message.content
    of_stream, of_plain = (
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        for choice in (streamed, plain)
    )
    assert of_stream == of_plain


async def test_errors_of_tools_are_the_clients_own_kind(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "Hello?"}],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "Answer"}},
        )
    assert caught.value.param == "tool_choice"

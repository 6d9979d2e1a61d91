"""Agents' loops by LangChain: tools bound, called, streamed and answered, on a server on the loopback interface."""

import json
from collections.abc import AsyncIterator
from functools import reduce
from operator import add
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import served
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio


@tool
def plus(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def divide(a: float, b: float) -> float:
    """Divide one number by another."""
    return a / b


TOOLS: dict[str, BaseTool] = {"plus": plus, "divide": divide}


def tagged(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


REPLIES = {
    "Add 1 and 20, then halve.": tagged("plus", a=1, b=20),
    "<tool_response>\n21\n": tagged("divide", a=21, b=0),
    "Error: float division by zero": "That failed.\n" + tagged("divide", a=21, b=2),
    "<tool_response>\n10.5\n": "It is 10.5.",
    "Both at once!": tagged("plus", a=1, b=2) + "\n" + tagged("divide", a=1, b=2),
    "Hello?": "Hi.",
}
SYSTEM = SystemMessage("You are careful with numbers. " * 4)


@pytest.fixture
async def base_url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=512, max_model_len=4096)
    async with served(engine) as url:
        yield f"{url}/v1"


def chat_model(base_url: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=base_url, api_key="none", model="stub", max_retries=0, **settings)


async def run_calls(message: AIMessage) -> list[BaseMessage]:
    """Run a message's calls; an error is told to the model."""
    results: list[BaseMessage] = []
    for call in message.tool_calls:
        try:
            result = str(TOOLS[call["name"]].invoke(call["args"]))
        except ZeroDivisionError as error:
            result = f"Error: {error}"
        results.append(ToolMessage(result, tool_call_id=call["id"]))
    return results


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_loop_goes_on_until_the_answer_and_hits_the_cache_in_every_step(
    base_url: str, is_streamed: bool
) -> None:
    model = chat_model(base_url, stream_usage=True).bind_tools(list(TOOLS.values()))
    messages: list[BaseMessage] = [SYSTEM, HumanMessage("Add 1 and 20, then halve.")]
    known = 0
    answers = []
    while not isinstance(messages[-1], AIMessage):
        if is_streamed:
            answer = reduce(add, [chunk async for chunk in model.astream(messages)])
        else:
            answer = await model.ainvoke(messages)
        assert isinstance(answer, AIMessage)
        usage = answer.usage_metadata
        assert usage is not None
        # All of the step before but its last token, whose K/V nothing needed.
        assert usage["input_token_details"]["cache_read"] >= known - 1
        known = usage["total_tokens"]
        answers.append(answer)
        messages += [answer, *await run_calls(answer)]
    assert [[(call["name"], call["args"]) for call in answer.tool_calls] for answer in answers] == [
        [("plus", {"a": 1, "b": 20})],
        [("divide", {"a": 21, "b": 0})],
        [("divide", {"a": 21, "b": 2})],
        [],
    ]
    assert [answer.content for answer in answers] == ["", "", "That failed.", "It is 10.5."]
    assert [answer.response_metadata["finish_reason"] for answer in answers] == ["tool_calls"] * 3 + ["stop"]


@pytest.mark.parametrize("choice", [None, "auto", "any", "required", "plus", True])
async def test_the_pieces_of_a_streamed_call_add_up_to_the_plain_one(base_url: str, choice: Any) -> None:
    offered = [plus] if choice is True else list(TOOLS.values())
    model = chat_model(base_url).bind_tools(offered, tool_choice=choice)
    question = [HumanMessage("Add 1 and 20, then halve.")]
    chunks = [chunk async for chunk in model.astream(question)]
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert {piece["index"] for piece in pieces} == {0}
    assert [piece["name"] for piece in pieces if piece["name"]] == ["plus"]
    assert len([piece["id"] for piece in pieces if piece["id"]]) == 1
    assert json.loads("".join(piece["args"] or "" for piece in pieces)) == {"a": 1, "b": 20}
    streamed = reduce(add, chunks)
    assert isinstance(streamed, AIMessageChunk)
    plain = await model.ainvoke(question)
    [streamed_call], [call] = streamed.tool_calls, plain.tool_calls
    assert (streamed_call["name"], streamed_call["args"]) == (call["name"], call["args"])
    assert plain.response_metadata["finish_reason"] == streamed.response_metadata["finish_reason"] == "tool_calls"


async def test_tc_3_pieces_of_parallel_calls_have_their_own_index(base_url: str) -> None:
    model = chat_model(base_url).bind_tools(list(TOOLS.values()))
    chunks = [chunk async for chunk in model.astream([HumanMessage("Both at once!")])]
    streamed = reduce(add, chunks)
    assert isinstance(streamed, AIMessageChunk)
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [
        ("plus", {"a": 1, "b": 2}),
        ("divide", {"a": 1, "b": 2}),
    ]
    assert len({call["id"] for call in streamed.tool_calls}) == 2
    one = chat_model(base_url).bind_tools(list(TOOLS.values()), parallel_tool_calls=False)
    assert [call["name"] for call in (await one.ainvoke([HumanMessage("Both at once!")])).tool_calls] == ["plus"]


async def test_tools_need_not_be_called_and_none_forbids_it(base_url: str) -> None:
    for choice in ("auto", "none"):
        model = chat_model(base_url).bind_tools(list(TOOLS.values()), tool_choice=choice)
        answer = await model.ainvoke([HumanMessage("Hello?")])
        assert (answer.content, answer.tool_calls) == ("Hi.", [])
        assert answer.response_metadata["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_says_length(base_url: str) -> None:
    model = chat_model(base_url, max_completion_tokens=55).bind_tools([plus], tool_choice="any")
    question = [HumanMessage("Add 1 and 20, then halve.")]
    whole = await model.ainvoke(question)
    assert whole.response_metadata["finish_reason"] == "length"
    assert (whole.tool_calls, [call["name"] for call in whole.invalid_tool_calls]) == ([], ["plus"])
    streamed = reduce(add, [chunk async for chunk in model.astream(question)])
    assert isinstance(streamed, AIMessageChunk)
    # LangChain itself closes what is open in the arguments of a stream; the reason still tells.
    assert streamed.response_metadata["finish_reason"] == "length"
    assert [call["args"] for call in streamed.tool_calls] == [{"a": 1}]


@pytest.mark.parametrize("choice", ["any", "plus"])
async def test_a_call_that_must_be_made_is_one_call(base_url: str, choice: str) -> None:
    model = chat_model(base_url, max_completion_tokens=300).bind_tools(list(TOOLS.values()), tool_choice=choice)
    answer = await model.ainvoke([HumanMessage("Both at once!")])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("plus", {"a": 1, "b": 2})]


async def test_tc_4_a_tool_that_was_not_bound_is_a_bad_request(base_url: str) -> None:
    model = chat_model(base_url).bind_tools([plus], tool_choice={"type": "function", "function": {"name": "divide"}})
    with pytest.raises(openai.BadRequestError) as caught:
        await model.ainvoke([HumanMessage("Hello?")])
    assert caught.value.param == "tool_choice"

"""LangChain's with_structured_output, in each of its methods, against a server on the loopback interface."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal, TypedDict

import openai
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, ValidationError

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import served
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

Method = Literal["function_calling", "json_mode", "json_schema"]
METHODS: tuple[Method, ...] = ("function_calling", "json_mode", "json_schema")
JSON = '{"number": 42, "text": "It is \\"42\\", naïvely."}'


def called_with(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "Answer", "arguments": {arguments}}}\n</tool_call>'


REPLIES = {
    "By function_calling?": called_with(JSON),
    "By json_mode?": JSON,
    "By json_schema?": JSON,
    "Wrong?": '{"number": "many"}',
    "Hello?": "Hi.",
}


class Answer(BaseModel):
    """The answer to a question."""

    number: int
    text: str = Field(description="in words")


class AnswerKeys(TypedDict):
    """The answer to a question."""

    number: int
    text: str


ANSWER = Answer(number=42, text='It is "42", naïvely.')
# LangChain takes the name of a schema from its title.
SCHEMA = {**Answer.model_json_schema(), "title": "Answer"}


@pytest.fixture
async def base_url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, speaker(REPLIES), config=config, num_blocks=512, max_model_len=4096)
    async with served(engine) as url:
        yield f"{url}/v1"


def chat_model(base_url: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=base_url, api_key="none", model="stub", max_retries=0, **settings)


def question(method: Method) -> list[HumanMessage]:
    return [HumanMessage(f"By {method}?")]


@pytest.mark.parametrize("method", METHODS)
async def test_an_answer_becomes_a_model(base_url: str, method: Method) -> None:
    model = chat_model(base_url).with_structured_output(Answer, method=method)
    assert await model.ainvoke(question(method)) == ANSWER
    assert await asyncio.to_thread(model.invoke, question(method)) == ANSWER
    assert await model.abatch([question(method)] * 3) == [ANSWER] * 3


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
async def test_tc_4_strict_or_not_the_form_is_kept(base_url: str, method: Method, strict: bool | None) -> None:
    model = chat_model(base_url).with_structured_output(Answer, method=method, strict=strict)
    assert await model.ainvoke(question(method)) == ANSWER


@pytest.mark.parametrize("method", METHODS)
async def test_an_answer_becomes_a_dictionary(base_url: str, method: Method) -> None:
    model = chat_model(base_url).with_structured_output(SCHEMA, method=method)
    assert await model.ainvoke(question(method)) == ANSWER.model_dump()


async def test_the_form_may_be_a_typed_dictionary(base_url: str) -> None:
    model = chat_model(base_url).with_structured_output(AnswerKeys, method="json_schema")
    assert await model.ainvoke(question("json_schema")) == ANSWER.model_dump()


# LangChain dumps the client's parsed message by the schema of one that is not parsed, of which pydantic warns.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("method", METHODS)
async def test_a_stream_ends_with_the_answer(base_url: str, method: Method) -> None:
    model = chat_model(base_url).with_structured_output(Answer, method=method)
    *_, last = [part async for part in model.astream(question(method))]
    assert last == ANSWER


@pytest.mark.parametrize("method", METHODS)
async def test_the_raw_message_may_be_included(base_url: str, method: Method) -> None:
    model = chat_model(base_url).with_structured_output(Answer, method=method, include_raw=True)
    result = await model.ainvoke(question(method))
    assert (result["parsed"], result["parsing_error"]) == (ANSWER, None)
    raw = result["raw"]
    assert isinstance(raw, AIMessage)
    assert raw.usage_metadata["output_tokens"] > 0
    if method == "function_calling":
        assert [call["args"] for call in raw.tool_calls] == [json.loads(JSON)]
        assert raw.response_metadata["finish_reason"] == "tool_calls"
    else:
        assert raw.content == JSON
        assert raw.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("method", METHODS)
async def test_tc_7_an_answer_that_was_cut_off_is_never_taken_for_one(base_url: str, method: Method) -> None:
    cut = chat_model(base_url, max_completion_tokens=80 if method == "function_calling" else 20)
    model = cut.with_structured_output(Answer, method=method, include_raw=True)
    if method != "function_calling":
        # The openai package looks at finish_reason itself.
        with pytest.raises(openai.LengthFinishReasonError):
            await model.ainvoke(question(method))
        return
    result = await model.ainvoke(question(method))
    raw = result["raw"]
    assert (result["parsed"], raw.response_metadata["finish_reason"]) == (None, "length")
    [call] = raw.invalid_tool_calls
    assert call["name"] == "Answer"
    assert JSON.startswith(call["args"])
    assert not raw.tool_calls


async def test_json_mode_holds_to_json_and_leaves_the_schema_to_the_client(base_url: str) -> None:
    model = chat_model(base_url).with_structured_output(Answer, method="json_mode")
    with pytest.raises(OutputParserException) as caught:
        await model.ainvoke([HumanMessage("Wrong?")])
    assert isinstance(caught.value.__cause__, ValidationError)


async def test_a_form_that_cannot_be_enforced_is_the_clients_bad_request(base_url: str) -> None:
    schema = {"title": "Answer", "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for method, param in (("json_schema", "response_format"), ("function_calling", "tools")):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat_model(base_url).with_structured_output(schema, method=method).ainvoke([HumanMessage("Hello?")])
        assert caught.value.param == param
        assert "uniqueItems" in str(caught.value)

"""LangChain's ChatOpenAI against a server on the loopback interface."""

import asyncio
from collections.abc import AsyncIterator
from functools import reduce
from operator import add

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import served
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

REPLIES = {"Who are you?": "I am a stub.", "And now?": "Still a stub.", "Count.": "one two three"}
SYSTEM = "You answer in few words. " * 4


@pytest.fixture
async def base_url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    async with served(stub_engine(tokenizer, speaker(REPLIES), num_blocks=256, max_model_len=2048)) as url:
        yield f"{url}/v1"


def chat_model(base_url: str, **settings: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=base_url, api_key="none", model="stub", max_retries=0, **settings)


async def test_invoke_and_a_second_turn(base_url: str) -> None:
    model = chat_model(base_url)
    messages = [SystemMessage(SYSTEM), HumanMessage("Who are you?")]
    first = await asyncio.to_thread(model.invoke, messages)
    assert first.content == "I am a stub."
    assert first.response_metadata["finish_reason"] == "stop"
    second = await model.ainvoke([*messages, first, HumanMessage("And now?")])
    assert second.content == "Still a stub."
    # All of the first turn was cached, prompt and answer.
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["total_tokens"] - 1


async def test_tc_5_a_streams_usage_equals_invokes(base_url: str) -> None:
    model = chat_model(base_url, stream_usage=True)
    messages = [SystemMessage(SYSTEM), HumanMessage("Count.")]
    cold = [chunk async for chunk in model.astream(messages)]
    warm = [chunk async for chunk in model.astream(messages)]
    whole = await model.ainvoke(messages)
    assert "".join(chunk.content for chunk in cold) == whole.content == "one two three"
    for chunks in (cold, warm):
        # LangChain adds up what the chunks say, so it must be said once.
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    cold_usage, warm_usage = (reduce(add, chunks).usage_metadata for chunks in (cold, warm))
    assert cold_usage["input_token_details"]["cache_read"] == 0
    assert warm_usage["input_token_details"]["cache_read"] == warm_usage["input_tokens"] - 1
    assert warm_usage == whole.usage_metadata


async def test_a_batch_keeps_its_order(base_url: str) -> None:
    questions = ["Count.", "Who are you?", "And now?"] * 4
    answers = await chat_model(base_url).abatch([[HumanMessage(question)] for question in questions])
    assert [answer.content for answer in answers] == [REPLIES[question] for question in questions]


async def test_stop_and_length_reach_the_caller(base_url: str) -> None:
    model = chat_model(base_url)
    stopped = await model.ainvoke([HumanMessage("Count.")], stop=[" three"])
    assert (stopped.content, stopped.response_metadata["finish_reason"]) == ("one two", "stop")
    cut = await chat_model(base_url, max_completion_tokens=5).ainvoke([HumanMessage("Count.")])
    assert isinstance(cut, AIMessage)
    assert (cut.content, cut.response_metadata["finish_reason"]) == ("one t", "length")


async def test_the_plain_calls_do_what_the_async_ones_do(base_url: str) -> None:
    model = chat_model(base_url, stream_usage=True)

    def call() -> None:
        assert model.invoke("Count.").content == "one two three"
        chunks = list(model.stream("Count."))
        assert "".join(chunk.content for chunk in chunks) == "one two three"
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
        answers = model.batch(["Count.", "Who are you?"])
        assert [answer.content for answer in answers] == ["one two three", "I am a stub."]

    await asyncio.to_thread(call)


async def test_a_streams_last_chunks_say_why_it_ended(base_url: str) -> None:
    for settings, text, reason in (
        ({}, "one two three", "stop"),
        ({"max_completion_tokens": 5}, "one t", "length"),
        ({"stop_sequences": [" two"]}, "one", "stop"),
    ):
        chunks = [chunk async for chunk in chat_model(base_url, **settings).astream("Count.")]
        assert "".join(chunk.content for chunk in chunks) == text
        assert [
            chunk.response_metadata["finish_reason"] for chunk in chunks if "finish_reason" in chunk.response_metadata
        ] == [reason]


async def test_several_answers_and_a_seed_reach_the_server(base_url: str) -> None:
    result = await chat_model(base_url, n=2, seed=1).agenerate([[HumanMessage("Count.")]])
    assert [generation.text for generation in result.generations[0]] == ["one two three"] * 2

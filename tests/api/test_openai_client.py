"""The openai package's own client, over a socket."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, served
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(stub_engine(tokenizer, alphabet)) as base_url,
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    messages = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model=model, messages=messages, max_completion_tokens=5)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("abcde", "length")
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    pieces, usages = [], []
    async for chunk in await client.chat.completions.create(
        model=model, messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
    ):
        pieces += [choice.delta.content for choice in chunk.choices]
        usages += [chunk.usage] if chunk.usage else []
    assert "".join(pieces) == "abcde"
    assert [usage.completion_tokens for usage in usages] == [5]
    assert usages[0].prompt_tokens_details.cached_tokens > 0


async def test_completions_with_logprobs(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="stub", prompt=["a", "b"], n=2, max_tokens=2, logprobs=1)
    assert [choice.text for choice in whole.choices] == ["bc", "bc", "cd", "cd"]
    assert whole.choices[0].logprobs.tokens == ["b", "c"]


async def test_errors_are_the_clients_own_kinds(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "a"}])
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model="stub", prompt="x" * 600)
    assert too_long.value.code == "context_length_exceeded"


async def test_sc_6_a_request_id_may_be_used_twice_at_once(client: openai.AsyncOpenAI) -> None:
    async def say(prompt: str) -> str:
        chunks = await client.completions.create(
            model="stub", prompt=prompt, max_tokens=8, stream=True, extra_headers={"x-request-id": "same"}
        )
        assert chunks.response.headers["x-request-id"] == "same"
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    expected = {"a": "bcdefghi", "m": "nopqrstu", "x ": "abcdefgh"}
    async with asyncio.timeout(10):
        assert await asyncio.gather(*map(say, expected)) == list(expected.values())
        assert await say("a") == expected["a"]


async def test_api_1_content_parts_make_the_same_prompt(client: openai.AsyncOpenAI) -> None:
    contents = ["AB", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]]
    usages = [
        (await client.chat.completions.create(model="stub", messages=[{"role": "user", "content": content}])).usage
        for content in contents
    ]
    assert usages[0].prompt_tokens == usages[1].prompt_tokens


async def test_a_connection_serves_one_request_after_another(client: openai.AsyncOpenAI) -> None:
    async with httpx.AsyncClient(base_url=str(client.base_url)) as raw:
        for _ in range(3):
            assert (await raw.post("completions", content=b"{")).status_code == 400
            assert (await raw.post("completions", json={"prompt": "a", "stream": True})).status_code == 200

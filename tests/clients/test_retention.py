"""Prompts are kept for the openai package and LangChain, by fields of their requests and by plain calls."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, served
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

RULES = "You answer in few words. " * 8


@pytest.fixture
async def base_url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    config = EngineConfig(max_pinned_share=0.5)
    engine = stub_engine(tokenizer, alphabet, config=config, num_blocks=64, max_model_len=900)
    async with served(engine) as url:
        yield f"{url}/v1"


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


async def flood(client: openai.AsyncOpenAI) -> None:
    for letter in "abcdefgh":
        await client.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": letter * 400}], max_tokens=1
        )


async def num_cached(client: openai.AsyncOpenAI, question: str = "Why?") -> int:
    answer = await client.chat.completions.create(
        model="stub",
        messages=[{"role": "system", "content": RULES}, {"role": "user", "content": question}],
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    return answer.usage.prompt_tokens_details.cached_tokens


def system_message(**marks: Any) -> ChatCompletionMessageParam:
    message: Any = {"role": "system", "content": [{"type": "text", "text": RULES, **marks}]}
    return message


@pytest.mark.parametrize(
    "mark",
    [{"prompt_cache_breakpoint": {"mode": "explicit"}}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
)
async def test_a_marked_part_survives_a_flood(client: openai.AsyncOpenAI, mark: dict[str, Any]) -> None:
    messages = [system_message(**mark), {"role": "user", "content": "Why?"}]
    create = client.chat.completions.create
    async with await create(model="stub", messages=messages, stream=True, max_tokens=4) as stream:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "abcd"
    await flood(client)
    assert await num_cached(client) >= len(RULES)


async def test_the_fields_of_the_whole_prompt_keep_all_of_it(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="stub",
        messages=[{"role": "system", "content": RULES}, {"role": "user", "content": "Why?"}],
        # Older packages have no arguments for these.
        extra_body={"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}, "prompt_cache_retention": "24h"},
    )
    assert answer.usage is not None
    await flood(client)
    assert await num_cached(client) == answer.usage.prompt_tokens - 1


async def test_a_budget_that_is_used_up_is_a_conflict(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.ConflictError) as caught:
        await client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "x" * 600}],
            extra_body={"prompt_cache_retention": "24h"},
        )
    assert caught.value.code == "pin_budget_exceeded"


async def test_a_pin_is_made_and_ended_by_the_packages_plain_calls(client: openai.AsyncOpenAI) -> None:
    body = {"messages": [system_message()], "add_generation_prompt": False, "ttl": "10m"}
    pin: Any = await client.post("/cache/pin", body=body, cast_to=object)
    await flood(client)
    assert await num_cached(client) >= len(RULES)
    ended: Any = await client.delete(f"/cache/pin/{pin['id']}", cast_to=object)
    assert ended["deleted"] is True
    with pytest.raises(openai.NotFoundError) as caught:
        await client.delete(f"/cache/pin/{pin['id']}", cast_to=object)
    assert caught.value.code == "pin_not_found"


@pytest.mark.parametrize(
    "mark", [{"prompt_cache_breakpoint": {"mode": "explicit"}}, {"cache_control": {"type": "ephemeral"}}]
)
async def test_langchain_sends_the_marks_of_a_message(
    client: openai.AsyncOpenAI, chat_model: Callable[..., ChatOpenAI], mark: dict[str, Any]
) -> None:
    messages = [SystemMessage([{"type": "text", "text": RULES, **mark}]), HumanMessage("Why?")]
    assert (await chat_model(max_tokens=4).ainvoke(messages)).content == "abcd"
    await flood(client)
    assert await num_cached(client) >= len(RULES)

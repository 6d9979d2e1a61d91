"""The recipe of docs/API.md counts tokens for LangChain as the server does."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_openai import ChatOpenAI, OpenAI

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import served
from tests.clients.speaker import speaker
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

DOCUMENT = (Path(__file__).parents[2] / "docs" / "API.md").read_text(encoding="utf-8")
MODEL = "radix-tiny"
CALL = {"id": "c1", "name": "f", "args": {"a": 1}}
MESSAGES: list[BaseMessage] = [
    SystemMessage("You answer in few words."),
    HumanMessage("Who are you? Füße, 😊 and <|end|>"),
    AIMessage("", tool_calls=[CALL]),
    ToolMessage("42", tool_call_id="c1"),
]


@pytest.fixture
async def recipe(tokenizer: Tokenizer) -> AsyncIterator[dict[str, Any]]:
    """What the documented snippet defines, for a server of its own."""
    [code] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    table = speaker({"": "I am a stub."})
    engine = stub_engine(
        tokenizer, table, config=EngineConfig(served_model_name=MODEL), num_blocks=256, max_model_len=2048
    )
    async with served(engine) as url:
        defined: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:8000", url).replace('"MODEL"', f'"{MODEL}"'), defined)
        yield defined


async def test_tc_6_messages_count_as_a_chat_with_them(recipe: dict[str, Any]) -> None:
    model: ChatOpenAI = recipe["model"]
    for messages in (MESSAGES, MESSAGES[:2], MESSAGES[1:2]):
        counted = await asyncio.to_thread(recipe["num_tokens"], messages)
        answer = await asyncio.to_thread(model.invoke, messages)
        assert answer.usage_metadata is not None
        assert counted == answer.usage_metadata["input_tokens"]


async def test_tc_6_a_text_counts_as_a_completion_of_it(recipe: dict[str, Any]) -> None:
    text = "Füße, 😊 and  2 spaces"
    counted = await asyncio.to_thread(recipe["model"].get_num_tokens, text)
    completions = OpenAI(base_url=f"{recipe['SERVER']}/v1", api_key="none", model=MODEL, max_tokens=1, max_retries=0)
    result = await asyncio.to_thread(completions.generate, [text])
    assert result.llm_output is not None
    assert counted == result.llm_output["token_usage"]["prompt_tokens"]


async def test_tc_6_a_history_is_trimmed_by_the_servers_count(recipe: dict[str, Any]) -> None:
    count = recipe["num_tokens"]
    # LangChain counts the system message and the rest apart, so the opening of the answer counts twice.
    limit = sum([await asyncio.to_thread(count, MESSAGES[:number]) for number in (1, 2)])
    trimmed = await asyncio.to_thread(
        trim_messages, MESSAGES[:2] + MESSAGES[1:2], max_tokens=limit, token_counter=count, include_system=True
    )
    assert trimmed == MESSAGES[:2]

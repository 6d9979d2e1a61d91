"""What the cache is told of answers, by what a request says of tools."""

from typing import Any

import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import CHAT, COMPLETIONS, ask, called, stream
from tests.clients.speaker import speaker
from tests.recording_cache import recording_cache
from tests.stub import Table
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]
SAYS_IT: dict[str, Any] = {"messages": [{"role": "user", "content": "Add."}], "temperature": 0, "max_tokens": 300}


async def calls_told(tokenizer: Tokenizer, route: str, body: dict[str, Any], table: Table) -> list[bool | None]:
    """Return whether the cache was told of a call, for each answer to a request: once as a whole, once streamed."""
    cache_type, told = recording_cache()
    config = EngineConfig(tool_call_parser="hermes", max_num_batched_tokens=4096)
    engine = stub_engine(tokenizer, table, config=config, num_blocks=512, max_model_len=4096, cache_type=cache_type)
    async with called(engine) as client:
        await ask(client, route, **body)
        await stream(client, route, **body)
    return [one.answer.calls_tool for one in told]


@pytest.mark.parametrize(
    ("reply", "fields", "calls_tool"),
    [
        (CALL, {"tools": TOOLS}, True),
        (CALL, {"tools": TOOLS, "parallel_tool_calls": False}, True),
        (CALL, {"tools": TOOLS, "tool_choice": "required"}, True),
        (CALL, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
        (CALL, {"tools": TOOLS, "max_tokens": 20}, False),
        # The prompt tells how to write a call, the answer has none.
        ("Done.", {"tools": TOOLS}, False),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}, False),
        (CALL, {}, False),
    ],
)
async def test_a_chat_that_has_tools_and_an_answer_that_calls_one(
    tokenizer: Tokenizer, reply: str, fields: dict[str, Any], calls_tool: bool
) -> None:
    table = speaker({"Add.": reply})
    assert await calls_told(tokenizer, CHAT, SAYS_IT | fields, table) == [calls_tool] * 2


async def test_a_completion_calls_no_tool_whatever_its_text(tokenizer: Tokenizer) -> None:
    said = f"{CALL}<|end|>"
    ids = tokenizer.encode(said)
    body = {"prompt": "hi", "temperature": 0, "max_tokens": 300, "n": 2}
    assert await calls_told(tokenizer, COMPLETIONS, body, lambda context: {ids[len(context) - 2]: 1.0}) == [False] * 4

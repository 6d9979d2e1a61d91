"""Public prefixes over HTTP: tenants share the K/V of what the operator names, and see no more of each other."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import CHAT, COMPLETIONS, alphabet, called
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

KEYS = ("operator", "acme=first", "other=second")
SYSTEM = "You write the alphabet, and nothing else."
TEXT = "Once upon a time there was a king"
TOOL = {"type": "function", "function": {"name": "sing", "parameters": {"type": "object", "properties": {}}}}
# A token is a byte and a control token one; 16 are a block. The chats go on behind <|end|>\n<|start|>.
NUM_SYSTEM_TOKENS = (len("<system\n") + len(SYSTEM) + len("<\n<")) // 16 * 16
NUM_TEXT_TOKENS = len(TEXT) // 16 * 16


@pytest.fixture
async def client(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps([SYSTEM, {"prompt": TEXT}]))
    config = EngineConfig(api_key=KEYS, public_prefixes=str(file), tool_call_parser="hermes")
    async with called(stub_engine(tokenizer, alphabet, config=config, num_blocks=128, max_model_len=1024)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def num_cached(client: httpx.AsyncClient, key: str, route: str, **fields: Any) -> int:
    response = await client.post(route, json={"max_tokens": 1, **fields}, headers=bearer(key))
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def chat(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]}


async def test_tenants_share_a_public_system_prompt_and_not_what_follows(client: httpx.AsyncClient) -> None:
    question = "a question that is the same for all"
    assert await num_cached(client, "first", CHAT, **chat(question)) == 0
    assert await num_cached(client, "second", CHAT, **chat(question)) == NUM_SYSTEM_TOKENS
    assert await num_cached(client, "operator", CHAT, **chat(question)) == NUM_SYSTEM_TOKENS
    assert await num_cached(client, "second", CHAT, **chat(question)) > NUM_SYSTEM_TOKENS + len(question)


async def test_chats_with_tools_share_the_system_prompt_too(client: httpx.AsyncClient) -> None:
    num_system_tokens = (len("<system\n") + len(SYSTEM)) // 16 * 16
    assert await num_cached(client, "first", CHAT, **chat("hi"), tools=[TOOL]) == 0
    assert await num_cached(client, "second", CHAT, **chat("hi")) == num_system_tokens
    other = {**TOOL, "function": {**TOOL["function"], "name": "dance"}}
    shared = await num_cached(client, "second", CHAT, **chat("hi"), tools=[other])
    assert shared > num_system_tokens, "what the template says of tools belongs to the prefix"


async def test_tenants_share_a_public_text(client: httpx.AsyncClient) -> None:
    prompt = f"{TEXT} who had three daughters"
    assert await num_cached(client, "first", COMPLETIONS, prompt=prompt) == 0
    assert await num_cached(client, "second", COMPLETIONS, prompt=prompt) == NUM_TEXT_TOKENS
    assert await num_cached(client, "operator", "/v1/beam_search", prompt=prompt, beam_width=2) == NUM_TEXT_TOKENS


async def test_pc_7_a_salt_asks_not_to_share(client: httpx.AsyncClient) -> None:
    prompt = f"{TEXT} who had three daughters"
    await num_cached(client, "first", COMPLETIONS, prompt=prompt)
    assert await num_cached(client, "first", COMPLETIONS, prompt=prompt, cache_salt="s") == 0
    assert await num_cached(client, "second", COMPLETIONS, prompt=prompt, cache_salt="s") == 0
    assert await num_cached(client, "second", COMPLETIONS, prompt=prompt) == NUM_TEXT_TOKENS
    assert await num_cached(client, "first", COMPLETIONS, prompt=prompt, cache_salt="s") == len(prompt) - 1


async def test_public_blocks_show_in_the_operators_report_and_count_as_free_in_a_tenants(
    client: httpx.AsyncClient,
) -> None:
    async def blocks(key: str) -> dict[str, int]:
        report = (await client.get("/v1/cache", headers=bearer(key))).json()
        found: dict[str, int] = report["blocks"]
        return found

    prompt = f"{TEXT} who had three daughters"
    num_blocks = -(-len(prompt) // 16)
    num_own = num_blocks - NUM_TEXT_TOKENS // 16
    await num_cached(client, "first", COMPLETIONS, prompt=prompt)
    assert (await blocks("first"))["cached"] == num_own
    assert (await blocks("first"))["free"] == 128 - num_own
    assert (await blocks("second"))["cached"] == 0
    assert (await blocks("operator"))["cached"] == num_blocks
    report = (await client.get("/v1/cache", headers=bearer("second"))).json()
    assert report["tokens"] == {"queried": 0, "hit": 0, "hit_rate": 0.0, "evicted": 0}


async def test_a_tenants_reset_leaves_public_blocks_and_the_operators_drops_them(client: httpx.AsyncClient) -> None:
    async def reset(key: str) -> int:
        dropped: int = (await client.post("/v1/cache/reset", headers=bearer(key))).json()["dropped_blocks"]
        return dropped

    prompt = f"{TEXT} who had three daughters"
    await num_cached(client, "first", COMPLETIONS, prompt=prompt)
    assert await reset("first") == -(-len(prompt) // 16) - NUM_TEXT_TOKENS // 16
    assert await num_cached(client, "first", COMPLETIONS, prompt=prompt) == NUM_TEXT_TOKENS
    assert await reset("operator") == -(-len(prompt) // 16)
    assert await num_cached(client, "second", COMPLETIONS, prompt=prompt) == 0

"""Answers that carry what the cache made of their prompt."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import BOTH, CHAT, COMPLETIONS, INPUTS, alphabet, ask, called, refusal_of, stream
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

EXPLAIN = "/v1/cache/explain"


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        yield client


@BOTH
async def test_an_answer_carries_what_explain_said_before_it(client: httpx.AsyncClient, route: str) -> None:
    fields: dict[str, Any] = INPUTS[route] | {"max_tokens": 3}
    for cached in (False, True):
        explained = await ask(client, EXPLAIN, **fields)
        body = await ask(client, route, **fields, cache_diagnostics=True)
        assert body["cache_diagnostics"] == explained
        assert (explained["cached_tokens"] > 0) is cached
        assert explained["cached_tokens"] == body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert explained["prompt_tokens"] == body["usage"]["prompt_tokens"]


@BOTH
async def test_a_stream_carries_it_in_its_first_chunk(client: httpx.AsyncClient, route: str) -> None:
    fields = INPUTS[route] | {"max_tokens": 3, "n": 2, "temperature": 1, "seed": 1}
    explained = await ask(client, EXPLAIN, **fields)
    chunks = await stream(client, route, **fields, cache_diagnostics=True)
    assert chunks[0]["cache_diagnostics"] == explained
    assert not any("cache_diagnostics" in chunk for chunk in chunks[1:])


async def test_each_prompt_of_a_completion_has_its_own(client: httpx.AsyncClient) -> None:
    await ask(client, COMPLETIONS, prompt="one ", max_tokens=2)
    body = await ask(client, COMPLETIONS, prompt=["one ", "two "], max_tokens=2, cache_diagnostics=True)
    assert [diagnosis["cause"] for diagnosis in body["cache_diagnostics"]] == ["none", "never_computed"]


@BOTH
@pytest.mark.parametrize("asked", [{}, {"cache_diagnostics": None}, {"cache_diagnostics": False}])
async def test_who_does_not_ask_gets_none(client: httpx.AsyncClient, route: str, asked: dict[str, Any]) -> None:
    assert "cache_diagnostics" not in await ask(client, route, **INPUTS[route], max_tokens=2, **asked)
    chunks = await stream(client, route, **INPUTS[route], max_tokens=2, **asked)
    assert not any("cache_diagnostics" in chunk for chunk in chunks)


@BOTH
async def test_a_beam_search_refuses_it_by_name(client: httpx.AsyncClient, route: str) -> None:
    fields = INPUTS[route] | {"use_beam_search": True, "max_tokens": 2}
    assert (await refusal_of(client, route, **fields, cache_diagnostics=True))["param"] == "cache_diagnostics"
    await ask(client, route, **fields, cache_diagnostics=False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", **INPUTS[CHAT]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_control": {"type": "ephemeral"}}, "cache_control"),
    ],
)
async def test_explain_refuses_what_it_cannot_take(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert (await refusal_of(client, EXPLAIN, **body))["param"] == param


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (EXPLAIN, {"prompt": "a"}, None),
        (COMPLETIONS, {"prompt": "a", "cache_diagnostics": True}, "cache_diagnostics"),
        (CHAT, INPUTS[CHAT] | {"cache_diagnostics": True}, "cache_diagnostics"),
    ],
)
async def test_a_server_without_a_prefix_cache_has_nothing_to_explain(
    tokenizer: Tokenizer, route: str, fields: dict[str, Any], param: str | None
) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(no_prefix_cache=True))) as client:
        refusal = await refusal_of(client, route, **fields)
    assert refusal["param"] == param
    assert "--no-prefix-cache" in refusal["message"]


async def test_explain_of_a_prompt_that_is_cut_is_of_what_is_left(client: httpx.AsyncClient) -> None:
    await ask(client, COMPLETIONS, prompt="xyz one ", truncate_prompt_tokens=4, max_tokens=2)
    explained = await ask(client, EXPLAIN, prompt="abc one ", truncate_prompt_tokens=4)
    assert (explained["prompt_tokens"], explained["cached_tokens"]) == (4, 3)


async def test_explain_changes_nothing(client: httpx.AsyncClient) -> None:
    await ask(client, COMPLETIONS, prompt="one two three ", max_tokens=2)
    before = (await client.get("/v1/cache")).json()
    for prompt in ("one two three ", "one two ", "other"):
        await ask(client, EXPLAIN, prompt=prompt)
    assert (await client.get("/v1/cache")).json() == before

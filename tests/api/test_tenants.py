"""What the routes tell and let a key do that names a tenant."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, error_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

KEYS = ("operator", "acme=first", "other=second")


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(api_key=KEYS))) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(client: httpx.AsyncClient, key: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    response = await client.post("/v1/completions", json=body, headers=bearer(key))
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


async def report(client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    response = await client.get("/v1/cache", headers=bearer(key))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def reset(client: httpx.AsyncClient, key: str) -> dict[str, int]:
    body: dict[str, int] = (await client.post("/v1/cache/reset", headers=bearer(key))).json()
    return body


async def test_the_cache_report_of_a_tenant_shows_no_trace_of_another(client: httpx.AsyncClient) -> None:
    empty = await report(client, "first")
    assert empty == {
        "block_size": 16,
        "blocks": {"total": 64, "free": 64, "cached": 0, "in_use": 0, "pinned": 0},
        "tokens": {"queried": 0, "hit": 0, "hit_rate": 0.0, "evicted": 0},
        "requests": {"running": 0, "waiting": 0},
        "tiers": [],
    }
    for _ in range(2):
        await complete(client, "second", "x" * 40)
        await complete(client, "operator", "x" * 40, cache_salt="acme")
    assert await report(client, "first") == empty
    usage = await complete(client, "first", "x" * 40)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_cache_report_of_a_tenant_tells_of_its_own_requests(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await complete(client, "first", "x" * 40)
        await complete(client, "second", "y" * 80)
    own = await report(client, "first")
    assert own["tokens"] == {"queried": 80, "hit": 39, "hit_rate": 39 / 80, "evicted": 0}
    assert own["blocks"] == {"total": 64, "free": 61, "cached": 3, "in_use": 0, "pinned": 0}


async def test_a_key_without_a_name_is_the_operators_and_sees_all(client: httpx.AsyncClient) -> None:
    await complete(client, "first", "x" * 40)
    await complete(client, "second", "y" * 80)
    seen = await report(client, "operator")
    assert seen["tokens"]["queried"] == 120
    assert seen["blocks"]["cached"] == 8
    assert seen["tree"]["nodes"] > 0


async def test_the_metrics_are_the_operators(client: httpx.AsyncClient) -> None:
    assert (await client.get("/metrics", headers=bearer("operator"))).status_code == 200
    refused = await client.get("/metrics", headers=bearer("first"))
    assert (refused.status_code, error_of(refused)["code"]) == (403, "operator_only")


async def test_a_tenant_resets_its_own_blocks_and_the_operator_those_of_all(client: httpx.AsyncClient) -> None:
    for key in ("first", "second"):
        await complete(client, key, "x" * 40)
    assert await reset(client, "first") == {"dropped_blocks": 3, "kept_blocks": 0}
    assert await reset(client, "first") == {"dropped_blocks": 0, "kept_blocks": 0}
    cached = [(await complete(client, key, "x" * 40))["prompt_tokens_details"] for key in ("first", "second")]
    assert cached == [{"cached_tokens": 0}, {"cached_tokens": 39}]
    assert await reset(client, "operator") == {"dropped_blocks": 6, "kept_blocks": 0}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_tenant_is_told_like_everyone_that_the_engine_is_not_ready(tokenizer: Tokenizer, method: str) -> None:
    engine = stub_engine(tokenizer, alphabet, config=EngineConfig(api_key=KEYS))
    async with called(engine) as client:
        engine.status = "restarting"
        path = "/v1/cache" if method == "GET" else "/v1/cache/reset"
        answer = await client.request(method, path, headers=bearer("first"))
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_unavailable")

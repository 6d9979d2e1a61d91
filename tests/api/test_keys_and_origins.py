"""API keys and calls from web pages, together."""

from collections.abc import AsyncIterator

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, error_of
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

ORIGIN = "https://page.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
KEYS = ("plain", "acme=first", "acme=second", "other=third")


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(api_key=KEYS, cors_origin=(ORIGIN,))
    async with called(stub_engine(tokenizer, alphabet, config=config)) as client:
        yield client


async def test_api_14_a_preflight_needs_no_key(client: httpx.AsyncClient) -> None:
    answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()


async def test_api_14_another_origin_is_refused_in_the_error_shape(client: httpx.AsyncClient) -> None:
    answer = await client.options("/v1/chat/completions", headers=PREFLIGHT | {"origin": "https://else.example"})
    assert answer.status_code == 400
    error_of(answer)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic plain", "Bearer ", "Bearer"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/v1/cache", "/nowhere"])
async def test_api_14_without_a_right_key_a_page_can_read_the_401(
    client: httpx.AsyncClient, authorization: str | None, path: str
) -> None:
    headers = {"origin": ORIGIN} | ({} if authorization is None else {"authorization": authorization})
    answer = await client.get(path, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("authorization", ["Bearer plain", "bearer first", "BEARER third"])
async def test_api_14_a_right_key_opens(client: httpx.AsyncClient, authorization: str) -> None:
    assert (await client.get("/v1/models", headers={"authorization": authorization})).status_code == 200


async def test_probes_need_no_key(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready"):
        assert (await client.get(path)).status_code == 200


async def test_api_14_options_without_cors_is_a_405(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(api_key=KEYS))) as client:
        answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 405
        error_of(answer)


async def test_tenants_share_prefixes_with_themselves_only(client: httpx.AsyncClient) -> None:
    async def cached(key: str, **fields: str) -> int:
        body = {"prompt": "x" * 40 + " ", "max_tokens": 1, **fields}
        answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    assert await cached("first") == 0
    assert await cached("second") == 40
    assert await cached("third") == 0
    assert await cached("plain") == 0
    # A salt that is spelled like a tenant is no tenant.
    assert await cached("plain", cache_salt="acme") == 0

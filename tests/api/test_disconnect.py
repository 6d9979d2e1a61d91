"""A client that goes away frees what its request held, wherever the request was."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Message

from radixserve.api.app import create_app
from radixserve.config import EngineConfig
from radixserve.engine.async_engine import AsyncEngine
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import DEADLINE, served, wait_until_idle
from tests.stub import always
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
SEVERAL: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 4000})


def endless_engine(tokenizer: Tokenizer, **settings: Any) -> AsyncEngine:
    """An engine whose answers take far longer than these tests."""
    return stub_engine(tokenizer, always(97), config=EngineConfig(**settings), num_blocks=4096, max_model_len=16384)


async def send(base_url: str, path: str, fields: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a connection of its own, and return the connection."""
    address = urlsplit(base_url)
    assert address.port is not None
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(fields).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def wait_for_requests(client: httpx.AsyncClient, **expected: int) -> None:
    """Return when so many sequences run and wait. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE):
        while (await client.get("/v1/cache")).json()["requests"] != expected:
            pass


@pytest.mark.parametrize(("path", "fields"), [CHAT, SEVERAL], ids=["chat", "several prompts"])
@pytest.mark.parametrize("n", [1, 4])
async def test_sc_7_a_streamed_request_ends_with_its_client(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], n: int
) -> None:
    async with served(endless_engine(tokenizer)) as base_url, httpx.AsyncClient(base_url=base_url) as client:
        reader, writer = await send(base_url, path, fields | {"n": n, "stream": True})
        async with asyncio.timeout(DEADLINE):
            for _ in range(3):
                await reader.readuntil(b"data: ")
        writer.close()
        await wait_until_idle(client)


@pytest.mark.parametrize(("path", "fields"), [CHAT, SEVERAL], ids=["chat", "several prompts"])
@pytest.mark.parametrize("n", [1, 4])
async def test_sc_7_a_request_that_is_not_streamed_ends_with_its_client(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], n: int
) -> None:
    async with served(endless_engine(tokenizer)) as base_url, httpx.AsyncClient(base_url=base_url) as client:
        _, writer = await send(base_url, path, fields | {"n": n})
        await wait_for_requests(client, running=n * len(fields.get("prompt", "x")), waiting=0)
        writer.close()
        await wait_until_idle(client)


@pytest.mark.parametrize("streams", [True, False])
async def test_sc_7_a_waiting_request_ends_with_its_client_and_disturbs_nobody(
    tokenizer: Tokenizer, streams: bool
) -> None:
    engine = endless_engine(tokenizer, max_num_seqs=1)
    async with served(engine) as base_url, httpx.AsyncClient(base_url=base_url) as client:
        reader, running = await send(base_url, *CHAT[:1], CHAT[1] | {"stream": True})
        await wait_for_requests(client, running=1, waiting=0)
        _, waiting = await send(base_url, *CHAT[:1], CHAT[1] | {"stream": streams})
        await wait_for_requests(client, running=1, waiting=1)
        waiting.close()
        await wait_for_requests(client, running=1, waiting=0)
        async with asyncio.timeout(DEADLINE):
            for _ in range(3):
                await reader.readuntil(b"data: ")
        running.close()
        await wait_until_idle(client)


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(tokenizer: Tokenizer) -> None:
    async with served(endless_engine(tokenizer)) as base_url, httpx.AsyncClient(base_url=base_url) as client:
        address = urlsplit(base_url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await wait_until_idle(client)
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200


@pytest.mark.parametrize("ends_after", [None, 2], ids=["endless", "two tokens"])
@pytest.mark.parametrize("num_read", [1, 2, 3, 4])
async def test_a_reader_that_stops_reading_is_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ends_after: int | None, num_read: int
) -> None:
    """Of two tokens there are a start, two events, [DONE] and an end to read."""
    monkeypatch.setattr("radixserve.api.generation_response.MAX_SEND_SECONDS", 0.05)
    engine = endless_engine(tokenizer)
    await engine.start()
    app = create_app(engine)
    num_sent = 0

    async def send_some(message: Message) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent > num_read:
            await asyncio.Event().wait()

    fields = CHAT[1] | {"stream": True, "max_tokens": ends_after}
    bodies = iter([{"type": "http.request", "body": json.dumps(fields).encode()}])

    async def receive() -> Message:
        for message in bodies:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nothing more comes")

    scope = {"type": "http", "method": "POST", "path": CHAT[0], "headers": [], "query_string": b""}
    try:
        async with asyncio.timeout(DEADLINE):
            await app(scope, receive, send_some)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            await wait_until_idle(client)
    finally:
        await engine.close()
    assert num_sent == num_read + 1

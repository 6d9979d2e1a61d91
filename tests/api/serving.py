"""Ways to call the application, and the models that it serves in these tests."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from radixserve.api.app import create_app
from radixserve.engine.async_engine import AsyncEngine
from tests.byte_tokenizer import END

DEADLINE = 10.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Both end with a token that is no letter, so that the alphabet begins at a.
INPUTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi "},
}
BOTH = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])


@asynccontextmanager
async def called(engine: AsyncEngine, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start the engine and yield a client that calls the application without a socket."""
    await engine.start()
    try:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            yield client
    finally:
        await engine.close()


@asynccontextmanager
async def served(engine: AsyncEngine) -> AsyncIterator[str]:
    """Start the engine and serve it on a free port; yield the base URL."""
    await engine.start()
    config = uvicorn.Config(create_app(engine), lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # The engine first: it ends the streams that a failed test has left open, on which the server would wait.
            await engine.close()
            server.should_exit = True
            await serving


def alphabet(context: Sequence[int]) -> Mapping[int, float]:
    """After a letter comes the next one, after z the end; after anything else comes a."""
    last = context[-1]
    if last == ord("z"):
        return {END: 1.0}
    return {last + 1 if ord("a") <= last < ord("z") else ord("a"): 1.0}


def coin(context: Sequence[int]) -> Mapping[int, float]:
    """Heads, tails, or the end."""
    return {ord("h"): 0.4, ord("t"): 0.4, END: 0.2}


def events_of(stream: str) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream, which must end with [DONE]."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of an answer, whose shape must be OpenAI's."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def wait_until_idle(client: httpx.AsyncClient) -> None:
    """Return when the cache says that no request holds a block. Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE):
        while True:
            report = (await client.get("/v1/cache")).json()
            blocks, requests = report["blocks"], report["requests"]
            assert blocks["free"] + blocks["cached"] + blocks["in_use"] == blocks["total"]
            if blocks["in_use"] == 0 and requests == {"running": 0, "waiting": 0}:
                return
            # A call without a socket need not let the event loop turn, and the engine runs in it.
            await asyncio.sleep(0)


async def ask(client: httpx.AsyncClient, route: str, **fields: Any) -> dict[str, Any]:
    """Return the body of an answer that must be a 200."""
    response = await client.post(route, json=fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def stream(client: httpx.AsyncClient, route: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of an answer that must be a whole stream."""
    response = await client.post(route, json=fields | {"stream": True})
    assert response.status_code == 200, response.text
    return events_of(response.text)


async def refusal_of(client: httpx.AsyncClient, route: str, **fields: Any) -> dict[str, Any]:
    """Return the error of an answer that must be a 400."""
    response = await client.post(route, json=fields)
    assert response.status_code == 400, response.text
    return error_of(response)


def text_of(pieces: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a choice, of chat or completions, whole or in pieces."""
    texts = []
    for piece in pieces:
        part = piece.get("message") or piece.get("delta")
        texts.append(piece["text"] if part is None else part.get("content") or "")
    return "".join(texts)

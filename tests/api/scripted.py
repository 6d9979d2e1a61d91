"""Conversations with a model that says what a script has for it, and what the server makes of them."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import CHAT, ask, called
from tests.stub import Table
from tests.stub_engine import stub_engine

EXPLAIN = "/v1/cache/explain"
DEFAULT_REPLY = "Yes, I have looked at it, and this is my answer to your question."

Messages = list[dict[str, Any]]


class Script:
    """A model's answers: that whose key is in the last turn, else DEFAULT_REPLY; as text, or as the tokens to say."""

    def __init__(self, tokenizer: Tokenizer, replies: Mapping[str, str | Sequence[int]]) -> None:
        self._tokenizer = tokenizer
        self._replies = {key: self._token_ids(reply) for key, reply in replies.items()}
        self._default = self._token_ids(DEFAULT_REPLY)
        self._opening = tokenizer.encode("<|im_start|>assistant\n")
        [self._end] = tokenizer.eos_token_ids

    def table(self) -> Table:
        """Return the model."""

        def say(context: Sequence[int]) -> Mapping[int, float]:
            start = self._answer_start(list(context))
            asked = self._tokenizer.decode(context[max(start - 80, 0) : start])
            reply = next((reply for key, reply in self._replies.items() if key in asked), self._default)
            said = len(context) - start
            return {reply[said] if said < len(reply) else self._end: 1.0}

        return say

    def _answer_start(self, context: list[int]) -> int:
        size = len(self._opening)
        starts = range(len(context) - size, -1, -1)
        return next((start + size for start in starts if context[start : start + size] == self._opening), len(context))

    def _token_ids(self, reply: str | Sequence[int]) -> list[int]:
        return self._tokenizer.encode(reply) if isinstance(reply, str) else list(reply)


class Talk:
    """A client of the server."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def say(self, messages: Messages, **fields: Any) -> Messages:
        """Send a chat and return it with the answer."""
        body = await ask(self.client, CHAT, messages=messages, max_tokens=64, **fields)
        return [*messages, body["choices"][0]["message"]]

    async def explain(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        """Return what the server says of a chat."""
        return await ask(self.client, EXPLAIN, messages=messages, **fields)


@asynccontextmanager
async def talking(
    tokenizer: Tokenizer,
    replies: Mapping[str, str | Sequence[int]] | None = None,
    *,
    config: EngineConfig | None = None,
    num_blocks: int = 256,
    clock: Callable[[], float] = time.monotonic,
    **headers: str,
) -> AsyncIterator[Talk]:
    """Yield a client of a server whose model follows a script. clock: the cache's."""
    table = Script(tokenizer, replies or {}).table()
    engine = stub_engine(tokenizer, table, config=config, num_blocks=num_blocks, max_model_len=2048, clock=clock)
    async with called(engine, **headers) as client:
        yield Talk(client)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(name: str, **properties: str) -> dict[str, Any]:
    """A tool with string parameters, described in these words."""
    described = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": described, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Call {name}.", "parameters": parameters}}

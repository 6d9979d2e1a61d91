"""A running server as the one who answers."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from radixserve.bench.client import stream_chat
from radixserve.bench.message import Message, as_json
from radixserve.bench.server import Server
from radixserve.cli.responder import AnswerPart


class ServerResponder:
    """Answers by /v1/chat/completions of any OpenAI-compatible server.

    model: None takes the first one that the server lists. settings: fields of each request beside the messages.
    """

    def __init__(self, server: Server, model: str | None, settings: dict[str, Any]) -> None:
        self._server = server
        self._model = model
        self._settings = settings

    async def start(self) -> str:
        """Find the model. Raises ServerCallFailed if the server cannot be reached."""
        if self._model is None:
            self._model = await self._server.first_model()
        return f"{self._model} at {self._server.root}"

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer; until the usage comes, a chunk with text counts as a token."""
        body = {
            "model": self._model,
            "messages": as_json(messages),
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        num_chunks = 0
        async with aclosing(stream_chat(self._server, body)) as pieces:
            async for piece in pieces:
                num_chunks += piece.num_chunks
                usage = piece.usage
                if usage is None:
                    yield AnswerPart(text=piece.text, num_generated_tokens=num_chunks)
                    continue
                yield AnswerPart(
                    text=piece.text,
                    num_generated_tokens=usage.completion_tokens or num_chunks,
                    num_prompt_tokens=usage.prompt_tokens,
                    num_cached_tokens=usage.cached_tokens,
                )

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

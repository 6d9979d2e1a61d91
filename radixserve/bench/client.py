"""One streamed chat completion: what was said, when each piece came, and what the server counted."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from radixserve.bench.server import Server
from radixserve.errors import ServerCallFailed

CHAT_PATH = "/v1/chat/completions"


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the server counted; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were read from the server's cache."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _StreamedMessage(msgspec.Struct):
    content: str | None = None
    # Two spellings of the same: what a reasoning model says before its answer.
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _StreamedMessage | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Piece(msgspec.Struct):
    """What came at one moment. num_chunks: the chunks with text among it.

    text is the answer alone; thinking is what a reasoning model says before it.
    """

    arrived: float
    text: str
    thinking: str
    num_chunks: int
    finish_reason: str | None
    usage: Usage | None


async def stream_chat(server: Server, body: dict[str, Any]) -> AsyncGenerator[Piece]:
    """Send one streamed chat completion; yield what comes, stamped by time.perf_counter as soon as it is there.

    body lacks only `stream`. To be read to its end or closed (contextlib.aclosing). Raises ServerCallFailed, also
    for an error inside the stream and for a stream that ends before the answer does.
    """
    is_finished = False
    async with aclosing(server.stream(CHAT_PATH, {**body, "stream": True})) as batches:
        async for events in batches:
            piece = _read(events, time.perf_counter())
            is_finished = is_finished or piece.finish_reason is not None
            yield piece
    if not is_finished:
        raise ServerCallFailed("the stream ended before the answer did")


def _read(events: list[bytes], arrived: float) -> Piece:
    piece = Piece(arrived, "", "", 0, None, None)
    for event in events:
        try:
            chunk = _decode_chunk(event)
        except msgspec.DecodeError as error:
            raise ServerCallFailed(f"the server streamed a chunk that is not OpenAI's: {error}") from None
        if chunk.error is not None:
            raise ServerCallFailed(f"the server ended the stream with an error: {_message_of(chunk.error)}")
        piece.usage = chunk.usage or piece.usage
        for choice in chunk.choices:
            piece.finish_reason = choice.finish_reason or piece.finish_reason
            if choice.delta is None:
                continue
            text = choice.delta.content or ""
            thinking = choice.delta.reasoning_content or choice.delta.reasoning or ""
            piece.text += text
            piece.thinking += thinking
            piece.num_chunks += bool(text or thinking)
    return piece


def _message_of(error: Any) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


class RequestRecord(msgspec.Struct):
    """One request as the client saw it. Times in seconds.

    ttft: from just before the request was sent to the first chunk with text; a chunk that only names the role does
    not count. gaps: between the arrivals of consecutive chunks with text, the first excluded; chunks that arrive
    together are 0 apart. latency: to the end of the stream. output_tokens: of the server's usage, or else the number
    of chunks with text. error: why it failed; its other figures are then left out of every sum.
    """

    session: int
    turn: int
    text: str = ""
    ttft: float | None = None
    gaps: list[float] = []
    latency: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    has_usage: bool = False
    finish_reason: str | None = None
    error: str | None = None


async def measure(
    server: Server, body: dict[str, Any], record: RequestRecord, on_chunks: Callable[[int], object]
) -> None:
    """Run one request and fill record; a failure is written there, not raised.

    on_chunks is told of each arrival's number of chunks with text.
    """
    started = time.perf_counter()
    last: float | None = None
    texts: list[str] = []
    num_chunks = 0
    usage: Usage | None = None
    try:
        async with aclosing(stream_chat(server, body)) as pieces:
            async for piece in pieces:
                usage = piece.usage or usage
                record.finish_reason = piece.finish_reason or record.finish_reason
                if not piece.num_chunks:
                    continue
                num_chunks += piece.num_chunks
                texts.append(piece.text)
                if last is None:
                    record.ttft = piece.arrived - started
                else:
                    record.gaps.append(piece.arrived - last)
                record.gaps += [0.0] * (piece.num_chunks - 1)
                last = piece.arrived
                on_chunks(piece.num_chunks)
    except ServerCallFailed as error:
        record.error = str(error)
    record.latency = time.perf_counter() - started
    record.text = "".join(texts)
    record.output_tokens = num_chunks
    if usage is not None:
        record.has_usage = usage.completion_tokens is not None
        record.output_tokens = num_chunks if usage.completion_tokens is None else usage.completion_tokens
        record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens

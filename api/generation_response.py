"""Answer a generating request, as one body or as a stream of events."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.api.disconnect import cancelled_on_disconnect
from radixserve.api.error_responses import encode_error, public_error
from radixserve.api.generation import Generation, UsageCounter, generate
from radixserve.api.records import RequestRecord, record_of
from radixserve.api.responses import Usage
from radixserve.api.service import Service
from radixserve.engine.answer import Answer
from radixserve.errors import RequestError
from radixserve.protocol import Delta

logger = logging.getLogger(__name__)

# Seconds that a reader may leave the server's buffers full; then its request is aborted, so that it holds no blocks.
MAX_SEND_SECONDS = 10.0

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells nginx not to collect the events.
    (b"x-accel-buffering", b"no"),
]


class AnswerFormat(Protocol):
    """The JSON of one request's answer: chat's or completions'."""

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """Return the event that tells of a delta of choice `index`, or None if it tells nothing."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the last event, with no choices and the usage."""

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """Return the whole answer."""


class GenerationResponse:
    """An ASGI response that generates while it is being sent, and aborts the generation when the client goes away."""

    def __init__(self, service: Service, generation: Generation, answer_format: AnswerFormat) -> None:
        self._service = service
        self._generation = generation
        self._format = answer_format
        self._recorder = service.answer_recorder(generation)
        self._usage = UsageCounter(generation.prompts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Raises RequestError for a failure before the first token; later ones end the stream."""
        record = record_of(scope)
        try:
            async with cancelled_on_disconnect(receive):
                if self._generation.is_streamed:
                    await self._stream(scope, record, send)
                else:
                    body = await self._collect(scope, record)
                    await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            record.usage = self._usage.usage()

    async def _collect(self, scope: Scope, record: RequestRecord) -> bytes:
        num_answers = len(self._generation.prompts) * self._generation.params.num_returned
        answers = [Answer(index) for index in range(num_answers)]
        async with aclosing(generate(self._service.engine, self._generation, record.request_id)) as deltas:
            is_first = True
            async for prompt_index, delta in deltas:
                if is_first:
                    self._observe_first_token(scope, record)
                    is_first = False
                answers[self._count(prompt_index, delta)].add(delta)
        return self._format.body(answers, self._usage.usage())

    async def _stream(self, scope: Scope, record: RequestRecord, send: Send) -> None:
        async with aclosing(generate(self._service.engine, self._generation, record.request_id)) as deltas:
            # Before the status goes out, so that an error has its own.
            prompt_index, delta = await anext(deltas)
            self._observe_first_token(scope, record)
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
            try:
                await self._send_events(send, record, (prompt_index, delta), deltas)
                await _send_body(send, b"", more_body=False)
            except TimeoutError:
                record.error = f"the client read nothing for {MAX_SEND_SECONDS:g} s"

    async def _send_events(
        self,
        send: Send,
        record: RequestRecord,
        first: tuple[int, Delta],
        deltas: AsyncGenerator[tuple[int, Delta], None],
    ) -> None:
        """Send the answer to its end, or to the error that ends it. Raises TimeoutError for a client that stalls."""
        try:
            await self._send_delta(send, *first)
            async for prompt_index, delta in deltas:
                await self._send_delta(send, prompt_index, delta)
        except TimeoutError:
            raise
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("the stream of request %s failed", record.request_id)
            record.error = public_error(error).message
            await _send_event(send, encode_error(public_error(error)))
        else:
            if self._generation.includes_usage:
                await _send_event(send, self._format.usage_chunk(self._usage.usage()))
            await _send_event(send, b"[DONE]")

    async def _send_delta(self, send: Send, prompt_index: int, delta: Delta) -> None:
        event = self._format.chunk(self._count(prompt_index, delta), delta)
        if event is not None:
            await _send_event(send, event)

    def _count(self, prompt_index: int, delta: Delta) -> int:
        """Take note of a delta and return the index of its choice: those of one prompt lie together."""
        self._usage.add(prompt_index, delta)
        if self._recorder is not None:
            self._recorder.add(delta)
        return prompt_index * self._generation.params.num_returned + delta.index

    def _observe_first_token(self, scope: Scope, record: RequestRecord) -> None:
        metrics = self._service.metrics
        metrics.observe_first_token(metrics.route_of(scope), time.monotonic() - record.started_at)


async def _send_event(send: Send, data: bytes) -> None:
    """Send one server-sent event, as _send_body does."""
    await _send_body(send, b"data: " + data + b"\n\n", more_body=True)


async def _send_body(send: Send, body: bytes, *, more_body: bool) -> None:
    """Send a piece of the body. Raises TimeoutError if the client has read nothing for MAX_SEND_SECONDS."""
    async with asyncio.timeout(MAX_SEND_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more_body})

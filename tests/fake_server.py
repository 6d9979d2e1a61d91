"""An OpenAI-compatible server on loopback whose every answer, count and fault a test decides."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

READY_SECONDS = 10


def num_tokens_of(text: str) -> int:
    """Tokens by the fake's own tokenizer: words and punctuation marks, and words over seven letters are two."""
    return sum(2 if len(word) > 7 else 1 for word in re.findall(r"\w+|[^\w\s]", text))


class FakeServer:
    """Set its attributes before a call; read `bodies` and `headers` after it.

    A prompt costs its messages' tokens, and 5 more a message for a template. cached_tokens is what an ideal prefix
    cache over whole messages would hit. delay: seconds before each content chunk, after the role chunk. Chat calls are
    counted from 1: failing_calls get that response, held_calls stay open after their words until the client leaves,
    which sets has_left. Without `stream` an answer comes whole: n hypotheses if it is a beam search and searches_beams,
    else the greedy answer n times.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.refused: set[str] = set()
        self.has_tokenize = True
        self.reports_usage = True
        self.reports_cached = True
        self.searches_beams = True
        self.words = ["Hello", " there", ",", " friend"]
        self.delay = 0.0
        self.num_chunks_at_once = 1
        self.most_at_once = 0
        self.failing_calls: dict[int, Response] = {}
        self.breaks_off = False
        self.stream_error: str | None = None
        self.held_calls: set[int] = set()
        self.has_left = threading.Event()
        self._num_open = 0
        self._seen: set[tuple[tuple[str, str], ...]] = set()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/version", self._version),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse({"object": "list", "data": [{"id": "fake/model", "object": "model"}]})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": "9.9"})

    async def _tokenize(self, request: Request) -> Response:
        if not self.has_tokenize:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        text = (await request.json())["prompt"]
        return JSONResponse({"count": num_tokens_of(text), "tokens": list(range(num_tokens_of(text)))})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if refused := self.refused & body.keys():
            return JSONResponse({"error": {"message": f"unknown field {refused.pop()}"}}, status_code=400)
        if failure := self.failing_calls.get(len(self.bodies)):
            return failure
        if not body.get("stream"):
            return JSONResponse(self._completion(body))
        return StreamingResponse(self._stream(body, len(self.bodies)), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], call: int) -> AsyncIterator[bytes]:
        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return b"data: " + json.dumps({"id": "1", "choices": choices, **more}).encode() + b"\n\n"

        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        self._num_open += 1
        self.most_at_once = max(self.most_at_once, self._num_open)
        length = body["max_tokens"] if body.get("ignore_eos") else min(len(self.words), body["max_tokens"])
        events = [
            event([{"index": 0, "delta": {"content": self.words[index % len(self.words)]}, "finish_reason": None}])
            for index in range(length)
        ]
        for start in range(0, length, self.num_chunks_at_once):
            await asyncio.sleep(self.delay)
            yield b"".join(events[start : start + self.num_chunks_at_once])
        self._num_open -= 1
        if call in self.held_calls:
            try:
                await asyncio.Event().wait()
            finally:
                self.has_left.set()
        if self.breaks_off:
            return
        if self.stream_error is not None:
            yield event([], error={"message": self.stream_error})
            return
        yield event([{"index": 0, "delta": {}, "finish_reason": "length"}])
        if self.reports_usage and body.get("stream_options", {}).get("include_usage"):
            yield event([], usage=self._usage(body, length))
        yield b"data: [DONE]\n\n"

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        num_answers = body.get("n", 1)
        is_search = self.searches_beams and body.get("use_beam_search")
        length = body["max_tokens"] if body.get("ignore_eos") else min(len(self.words), body["max_tokens"])
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": f"{self.words[0]} {index if is_search else ''}"},
                "finish_reason": "length",
            }
            for index in range(num_answers)
        ]
        return {"id": "1", "choices": choices, "usage": self._usage(body, length * num_answers)}

    def _usage(self, body: dict[str, Any], length: int) -> dict[str, Any]:
        messages = [(message["role"], message["content"]) for message in body["messages"]]
        costs = [num_tokens_of(content) + 5 for _, content in messages]
        known = max(n for n in range(len(messages)) if n == 0 or tuple(messages[:n]) in self._seen)
        self._seen |= {tuple(messages[:n]) for n in range(1, len(messages) + 1)}
        usage: dict[str, Any] = {"prompt_tokens": sum(costs), "completion_tokens": length}
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(costs[:known])}
        return usage


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve fake on a free port of the loopback in a thread; sets its url."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=0, log_level="error", lifespan="off"))
    started = threading.Event()

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.001)
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(READY_SECONDS)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(READY_SECONDS)

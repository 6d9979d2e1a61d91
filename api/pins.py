"""POST /v1/cache/warm and /v1/cache/pin, DELETE /v1/cache/pin/{id}: prompts that are computed, and kept for a time."""

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.api.disconnect import cancelled_on_disconnect
from radixserve.api.generation import Generation, UsageCounter, generate
from radixserve.api.incoming import Incoming, receive
from radixserve.api.messages import encode_messages
from radixserve.api.options import namespace_of
from radixserve.api.prompts import check_prompt_or_messages, encode_prompts
from radixserve.api.records import record_of
from radixserve.api.requests import PinRequest, WarmRequest
from radixserve.api.responses import CachePin, CacheUnpinned, CacheWarmed, Usage
from radixserve.api.retention import new_pin, read_ttl
from radixserve.api.service import Service, service_of
from radixserve.api.tools import check_tool_format, check_tools
from radixserve.errors import InvalidRequest, PinNotFound, PromptTooLong, RequestFailed
from radixserve.protocol import PinAt, Pins, ShowPins, Unpin, Unpinned
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.messages import refuse_marked_parts
from radixserve.tokenizer.tools import template_tools

DEFAULT_TTL = 300.0


async def warm(request: Request) -> "ComputeResponse":
    """Compute a prompt, so that the next request with it finds it in the cache."""
    incoming = await receive(request)
    generation = await incoming.in_worker(lambda incoming: _prepare(incoming, incoming.decode(WarmRequest)))

    async def body(usage: Usage) -> msgspec.Struct:
        cached_tokens = usage.prompt_tokens_details.cached_tokens
        return CacheWarmed(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached_tokens,
            computed_tokens=usage.prompt_tokens - cached_tokens,
        )

    return ComputeResponse(incoming.service, generation, body)


async def pin(request: Request) -> "ComputeResponse":
    """Compute a prompt and keep it in the cache for a time."""
    incoming = await receive(request)
    generation = await incoming.in_worker(_prepare_pin)
    [pin] = generation.pins[0]

    async def body(_: Usage) -> msgspec.Struct:
        return await _pinned(incoming, pin)

    return ComputeResponse(incoming.service, generation, body)


async def unpin(request: Request) -> Response:
    """End a pin of the caller's tenant; what it kept stays cached as anything else is."""
    service = service_of(request)
    service.ready()
    pin_id = request.path_params["id"]
    reply = await service.engine.control(Unpin(pin_id, record_of(request.scope).tenant))
    assert isinstance(reply, Unpinned)
    if not reply.is_found:
        raise PinNotFound(f"there is no pin {pin_id[:100]!r}; it may have ended")
    return Response(msgspec.json.encode(CacheUnpinned(id=pin_id)), media_type="application/json")


async def _pinned(incoming: Incoming, pin: PinAt) -> CachePin:
    """Return what the engine says of a pin that it has just made."""
    pins = await incoming.service.engine.control(ShowPins(incoming.tenant, pin.pin_id))
    assert isinstance(pins, Pins)
    if not pins.pins:
        raise RequestFailed(
            "the pin has ended already: its time was over, or a request could not run without its blocks"
        )
    [made] = pins.pins
    return CachePin(
        id=pin.pin_id,
        tokens=made.num_tokens,
        blocks=made.num_blocks,
        expires_at=round(time.time() + made.seconds_left),
        ttl=pin.ttl,
    )


def _prepare_pin(incoming: Incoming) -> Generation:
    request = incoming.decode(PinRequest)
    ttl = DEFAULT_TTL if request.ttl is None else read_ttl(request.ttl)
    generation = _prepare(incoming, request)
    [prompt] = generation.prompts
    return replace(generation, pins=[[new_pin(len(prompt), ttl)]])


def _prepare(incoming: Incoming, request: WarmRequest) -> Generation:
    """Check a request and turn it into token ids. Slow for long texts: off the event loop."""
    _check(incoming.service, request)
    namespace = namespace_of(incoming, request.cache_salt)
    prompt = _encode(incoming, request, namespace)
    if len(prompt) >= incoming.ready.max_model_len:
        field = "prompt" if request.messages is None else "messages"
        raise PromptTooLong(
            f"{field} has {len(prompt)} tokens; the model takes {incoming.ready.max_model_len}, prompt and answer "
            "together; shorten the prompt",
            param=field,
        )
    return Generation(
        prompts=[prompt],
        params=SamplingParams(max_tokens=0),
        namespace=namespace,
        is_streamed=False,
        includes_usage=False,
        returns_token_ids=False,
        priority=request.priority or 0,
    )


def _check(service: Service, request: WarmRequest) -> None:
    check_prompt_or_messages(request.prompt, request.messages)
    if service.engine.config.no_prefix_cache:
        raise InvalidRequest("this server runs with --no-prefix-cache; nothing is kept for another request")
    for name in ("truncate_prompt_tokens", "prompt_cache_retention", "prompt_cache_options"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} is not supported here; leave it out", param=name)
    refuse_marked_parts(request.messages or [], "here, where the whole prompt counts")


def _encode(incoming: Incoming, request: WarmRequest, namespace: bytes) -> list[int]:
    service = incoming.service
    tokenizer = service.engine.tokenizer
    functions = check_tools(request.tools, request.tool_choice)
    if request.messages is None:
        if functions:
            raise InvalidRequest("tools go with messages; a prompt has none", param="tools")
        [prompt] = encode_prompts([request.prompt or ""], tokenizer, incoming.ready.vocab_size)
        return prompt
    if functions:
        check_tool_format(service.engine.config.tool_call_parser, tokenizer)
    answers = service.answer_memory.lookup(namespace)
    return encode_messages(request.messages, request, tokenizer, template_tools(functions), answers)


class ComputeResponse:
    """An ASGI response that computes a prompt, and ends that when the client goes away.

    body: makes what is answered of the tokens that were computed.
    """

    def __init__(
        self, service: Service, generation: Generation, body: Callable[[Usage], Awaitable[msgspec.Struct]]
    ) -> None:
        self._service = service
        self._generation = generation
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send. Raises RequestError."""
        usage = UsageCounter(self._generation.prompts)
        try:
            async with cancelled_on_disconnect(receive):
                async with aclosing(
                    generate(self._service.engine, self._generation, record_of(scope).request_id)
                ) as deltas:
                    async for prompt_index, delta in deltas:
                        usage.add(prompt_index, delta)
                body = msgspec.json.encode(await self._body(usage.usage()))
                await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            record_of(scope).usage = usage.usage()

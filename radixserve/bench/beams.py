"""Beam searches on the chat route, by the fields that radixserve and vLLM share; their answers come whole."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from radixserve.bench.client import CHAT_PATH, RequestRecord, Usage
from radixserve.bench.server import Server
from radixserve.errors import NoBeamSearch, ServerCallFailed

# Statuses by which a server says that it does not take a field, and 501 of those that know it and cannot do it.
_REFUSALS = (400, 422, 501)


class _Answer(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Answer
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage


def beam_fields(width: int) -> dict[str, Any]:
    """Return the fields that ask for a search of this width and for all its hypotheses.

    n alone gives the width: vLLM has no other field for it.
    """
    return {"use_beam_search": True, "n": width}


async def measure_beams(
    server: Server, body: dict[str, Any], record: RequestRecord, on_tokens: Callable[[int], object]
) -> None:
    """Run one search and fill record, whose text is the best hypothesis; a failure is written there, not raised."""
    started = time.perf_counter()
    try:
        completion = await _search(server, body)
    except ServerCallFailed as error:
        record.error = str(error)
        return
    finally:
        record.latency = time.perf_counter() - started
    usage = completion.usage
    record.text = completion.choices[0].message.content or ""
    record.finish_reason = completion.choices[0].finish_reason
    record.has_usage = usage.completion_tokens is not None
    record.output_tokens = usage.completion_tokens or 0
    record.prompt_tokens = usage.prompt_tokens
    record.cached_tokens = usage.cached_tokens
    on_tokens(record.output_tokens)


async def check_beam_search(server: Server, body: dict[str, Any]) -> None:
    """Raise NoBeamSearch unless the server answers a short search with hypotheses.

    A server that ignores the field gives one answer, or the same one n times, and would be measured for what it does
    not do.
    """
    try:
        completion = await _search(server, body)
    except ServerCallFailed as error:
        if error.status in _REFUSALS:
            raise NoBeamSearch(f"no beam search: {error}") from None
        raise
    if len({choice.message.content for choice in completion.choices}) == 1:
        raise NoBeamSearch("no beam search: the server took use_beam_search, and gave one greedy answer")


async def _search(server: Server, body: dict[str, Any]) -> _Completion:
    answer = await server.post(CHAT_PATH, body)
    try:
        completion = msgspec.convert(answer, _Completion)
    except msgspec.ValidationError as error:
        raise ServerCallFailed(f"the server's answer is not OpenAI's: {error}") from None
    if not completion.choices:
        raise ServerCallFailed("the server's answer has no choices")
    return completion

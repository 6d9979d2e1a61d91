"""Sessions of a coding agent, as kv-cache-tester publishes them: one session a line, sub-agents inside it."""

from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from radixserve.core.eviction.answer import Answer
from radixserve.core.namespace import encode_namespace
from radixserve.errors import ConfigError
from radixserve.replay.sessions import Session, TimedRequest, interleave
from radixserve.replay.trace import Id, Trace

MAX_INPUT_TOKENS = 200_000
MAX_THINK_SECONDS = 600.0


class CodingRequest(msgspec.Struct):
    """One request; or a sub-agent, which has requests of its own and no hash_ids.

    t: seconds since the session or the sub-agent began. hash_ids: the ids of the input's whole blocks, one by one or as
    runs: first, length, first, length and so on.
    stop: why the answer ended; empty if that is not known.
    api_time: seconds that the request took. think_time: seconds between the end of the one before and this one.
    """

    t: float
    num_input_tokens: int = msgspec.field(name="in", default=0)
    num_output_tokens: int | None = msgspec.field(name="out", default=None)
    hash_ids: list[Id] = []
    stop: str | None = None
    api_time: float | None = None
    think_time: float | None = None
    requests: "list[CodingRequest]" = []


class CodingSession(msgspec.Struct):
    """One line. hash_id_scope: whether equal ids of two sessions are equal blocks (global) or mean nothing (local)."""

    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[CodingRequest]
    hash_id_scope: Literal["local", "global"] = "local"


class _Timed(NamedTuple):
    """Requests, and when the last of them ends."""

    requests: list[TimedRequest]
    end: float


def read_coding_sessions(name: str, lines: Sequence[CodingSession], num_slots: int) -> Trace:
    """Return the requests of all sessions, num_slots of them side by side.

    Left out are sessions with an input above MAX_INPUT_TOKENS. Raises ConfigError if block sizes differ.
    """
    lines = [line for line in lines if _max_input_tokens(line.requests) <= MAX_INPUT_TOKENS]
    block_sizes = {line.block_size for line in lines}
    if len(block_sizes) > 1:
        raise ConfigError(f"{name} has sessions of several block sizes, {sorted(block_sizes)}; split it by block size")
    requests = interleave([_session(line) for line in lines], num_slots)
    return Trace(name, max(block_sizes, default=1), requests, num_slots)


def _max_input_tokens(requests: list[CodingRequest]) -> int:
    return max((max(request.num_input_tokens, _max_input_tokens(request.requests)) for request in requests), default=0)


def _session(line: CodingSession) -> Session:
    timed = _time(line, line.requests, 0.0)
    return Session(sorted(timed.requests, key=lambda request: request.start), timed.end)


def _time(line: CodingSession, requests: list[CodingRequest], start: float) -> _Timed:
    """Return when each request comes: each follows the end of the one before by its pause, the first one start.

    A sub-agent begins as long after the last request as the trace says, and the requests after it do not wait for it.
    """
    namespace = b"" if line.hash_id_scope == "global" else encode_namespace(salt=line.id)
    timed: list[TimedRequest] = []
    begin, end, all_end = start, start, start
    last_t = requests[0].t if requests else 0.0
    for request in requests:
        if request.requests:
            sub_agent = _time(line, request.requests, begin + min(max(request.t - last_t, 0.0), MAX_THINK_SECONDS))
            timed += sub_agent.requests
            all_end = max(all_end, sub_agent.end)
            continue
        begin = end + min(request.think_time or 0.0, MAX_THINK_SECONDS)
        end = begin + (request.api_time or 0.0)
        last_t = request.t
        ids = _ids(request.hash_ids, request.num_input_tokens // line.block_size)
        if ids:
            timed.append(TimedRequest(begin, end, namespace, ids, _answer(request)))
    return _Timed(timed, max(end, all_end))


def _answer(request: CodingRequest) -> Answer | None:
    if request.num_output_tokens is None:
        return None
    return Answer(request.stop == "tool_use" if request.stop else None, request.num_output_tokens)


def _ids(hash_ids: list[int], num_blocks: int) -> "array[int]":
    """Return the ids of num_blocks blocks, which are given one by one or as runs."""
    firsts, lengths = hash_ids[::2], hash_ids[1::2]
    if len(firsts) != len(lengths) or (len(hash_ids) == num_blocks and sum(lengths) != num_blocks):
        return array("i", hash_ids)
    ids = array("i")
    for first, length in zip(firsts, lengths, strict=True):
        ids.frombytes(np.arange(first, first + length, dtype=np.int32).tobytes())
    return ids

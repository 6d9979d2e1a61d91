"""Mooncake's traces: one request a line, with its time and the ids of its blocks."""

from array import array
from collections.abc import Iterable

import msgspec

from radixserve.core.eviction.answer import Answer
from radixserve.replay.trace import EndedAnswer, Id, Trace, TracedRequest

TOKENS_PER_ID = 512


class MooncakeRequest(msgspec.Struct):
    """One line. timestamp: milliseconds. An equal id is an equal block behind equal blocks, outputs not included."""

    timestamp: float
    hash_ids: list[Id]
    output_length: int | None = None


def read_mooncake(name: str, lines: Iterable[MooncakeRequest]) -> Trace:
    """Return the requests by time; those of the same time as they stand in the file.

    An id counts as TOKENS_PER_ID tokens; in the trace the last one of a request may have fewer. How long an answer took
    and whether it called a tool is not told: it counts as ended when the next request comes.
    """
    by_time = sorted((line for line in lines if line.hash_ids), key=lambda line: line.timestamp)
    requests = [TracedRequest(b"", array("i", line.hash_ids), _ended(line, i)) for i, line in enumerate(by_time)]
    return Trace(name, TOKENS_PER_ID, requests, num_sessions=None)


def _ended(line: MooncakeRequest, number: int) -> EndedAnswer | None:
    return None if line.output_length is None else EndedAnswer(Answer(None, line.output_length), number + 1)

"""Mooncake's traces: one request a line, with its time and the ids of its blocks."""

from array import array
from collections.abc import Iterable

import msgspec

from radixserve.replay.trace import Id, Trace, TracedRequest

TOKENS_PER_ID = 512


class MooncakeRequest(msgspec.Struct):
    """One line. timestamp: milliseconds. An equal id is an equal block behind equal blocks, outputs not included."""

    timestamp: float
    hash_ids: list[Id]


def read_mooncake(name: str, lines: Iterable[MooncakeRequest]) -> Trace:
    """Return the requests by time; those of the same time as they stand in the file.

    An id counts as TOKENS_PER_ID tokens; in the trace the last one of a request may have fewer.
    """
    by_time = sorted(lines, key=lambda line: line.timestamp)
    requests = [TracedRequest(b"", array("i", line.hash_ids)) for line in by_time if line.hash_ids]
    return Trace(name, TOKENS_PER_ID, requests, num_sessions=None)

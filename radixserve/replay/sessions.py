"""The order of requests when sessions run side by side."""

import heapq
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from radixserve.core.eviction.answer import Answer
from radixserve.replay.trace import EndedAnswer, TracedRequest


class TimedRequest(NamedTuple):
    """A request, when it comes, and when its answer has ended, in seconds. answer: None if nothing is known of it."""

    start: float
    end: float
    namespace: bytes
    ids: "array[int]"
    answer: Answer | None = None


@dataclass(slots=True, frozen=True)
class Session:
    """The requests of one session, in the order of their starts; times count from the session's start.

    num_seconds: when the last of them ends.
    """

    requests: list[TimedRequest]
    num_seconds: float


def interleave(sessions: list[Session], num_slots: int) -> list[TracedRequest]:
    """Return the requests in the order of their times, with num_slots sessions under way at any time.

    Sessions start in the order given, each as soon as one before it has ended. Times depend on the trace alone, so
    the order is the same whatever the cache does. Of requests of the same time the earlier session's goes first.
    """
    free_at = [0.0] * num_slots
    timed: list[tuple[float, int, int, TimedRequest]] = []
    for index, session in enumerate(sessions):
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + session.num_seconds)
        timed += [
            (start + request.start, index, turn, request._replace(end=start + request.end))
            for turn, request in enumerate(session.requests)
        ]
    timed.sort(key=lambda entry: entry[:3])
    starts = [start for start, *_ in timed]
    return [_traced(number, request, starts) for number, (*_, request) in enumerate(timed)]


def _traced(number: int, request: TimedRequest, starts: list[float]) -> TracedRequest:
    ended = None
    if request.answer is not None:
        ended = EndedAnswer(request.answer, known_from=bisect_left(starts, request.end, lo=number + 1))
    return TracedRequest(request.namespace, request.ids, ended)

"""The order of requests when sessions run side by side."""

import heapq
from dataclasses import dataclass

from radixserve.replay.trace import TracedRequest


@dataclass(slots=True, frozen=True)
class Session:
    """The requests of one session, and when each comes, in seconds after the session's start.

    num_seconds: when the last of them ends.
    """

    requests: list[tuple[float, TracedRequest]]
    num_seconds: float


def interleave(sessions: list[Session], num_slots: int) -> list[TracedRequest]:
    """Return the requests in the order of their times, with num_slots sessions under way at any time.

    Sessions start in the order given, each as soon as one before it has ended. Times depend on the trace alone, so
    the order is the same whatever the cache does. Of requests of the same time the earlier session's goes first.
    """
    free_at = [0.0] * num_slots
    timed: list[tuple[float, int, int, TracedRequest]] = []
    for index, session in enumerate(sessions):
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + session.num_seconds)
        timed += [(start + offset, index, turn, request) for turn, (offset, request) in enumerate(session.requests)]
    timed.sort(key=lambda entry: entry[:3])
    return [request for *_, request in timed]

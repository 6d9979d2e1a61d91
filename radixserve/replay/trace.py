"""What a trace is, once it is read: requests in the order in which the cache meets them."""

from array import array
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from radixserve.core.eviction.answer import Answer

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class EndedAnswer(NamedTuple):
    """How a request's answer ended. known_from: index of the first request that came no earlier than that."""

    answer: Answer
    known_from: int


class TracedRequest(NamedTuple):
    """One request's input, and what is known of its answer: None for nothing.

    ids: int32, what its prompt consists of. Ids mean something only together with all ids before them and the
    namespace: the path is the key.
    """

    namespace: bytes
    ids: "array[int]"
    ended: EndedAnswer | None = None


@dataclass(slots=True, frozen=True)
class Trace:
    """Requests in the one order that every policy and the optimum are given.

    tokens_per_id: how many tokens an id stands for. If it is 1, the ids are the prompts' own tokens, and the last of a
    prompt is always computed, as in the engine. Ids of more tokens can all be hit.
    num_sessions: how many ran side by side, or None if the trace says itself when each request came.
    """

    name: str
    tokens_per_id: int
    requests: list[TracedRequest]
    num_sessions: int | None

    @property
    def max_ids(self) -> int:
        """Ids of the longest request."""
        return max(len(request.ids) for request in self.requests)

    @property
    def num_ids(self) -> int:
        """Ids of all requests."""
        return sum(len(request.ids) for request in self.requests)

    def num_reusable_ids(self, request: TracedRequest) -> int:
        """How many ids of a request can be hits."""
        return len(request.ids) - (self.tokens_per_id == 1)

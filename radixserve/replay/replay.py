"""Run a trace through the cache that the engine runs on."""

import heapq
from array import array
from typing import get_args

from radixserve.config import EvictionPolicy
from radixserve.core.eviction.answer import Answer
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.sequence import Request, Sequence
from radixserve.replay.trace import Trace
from radixserve.sampling_params import SamplingParams

POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)

_PARAMS = SamplingParams(max_tokens=1)
# Stands for the tokens of a prompt behind its last whole id. It is never computed, and so never in the cache.
_NOT_IN_THE_TRACE = array("i", [0])


def replay(trace: Trace, capacity_ids: int, policy: EvictionPolicy) -> list[int]:
    """Return how many ids of each request were found in a cache that holds capacity_ids of them.

    Requests run one at a time, each from match to release as the scheduler does it; an id is a token, and a token is a
    block. Outputs do not enter the cache; how an answer ended is told to it when a request comes that came no earlier.
    capacity_ids must be at least trace.max_ids.
    """
    cache = KVCache(capacity_ids, 1, CacheSettings(eviction_policy=policy))
    end = array("i") if trace.tokens_per_id == 1 else _NOT_IN_THE_TRACE
    num_hits = []
    unended: list[tuple[int, int, Sequence, Answer]] = []
    for number, (namespace, ids, ended) in enumerate(trace.requests):
        while unended and unended[0][0] <= number:
            _, _, answered, answer = heapq.heappop(unended)
            cache.record_answer(answered, answer)
        request = Request(str(number), _PARAMS, namespace, num_prompt_tokens=len(ids), seed=0)
        sequence = Sequence(request, 0, ids + end)
        match = cache.match(sequence)
        has_room = cache.allocate(sequence, len(ids) - match.num_tokens, match)
        assert has_room
        num_hits.append(sequence.num_computed_tokens)
        sequence.num_computed_tokens = len(ids)
        cache.commit(sequence)
        cache.end_step()
        cache.release(sequence)
        if ended is not None:
            heapq.heappush(unended, (ended.known_from, number, sequence, ended.answer))
    return num_hits

"""The figures of a replay."""

from collections.abc import Iterable, Iterator

import msgspec

from radixserve.config import EvictionPolicy
from radixserve.errors import ConfigError
from radixserve.replay.optimum import Use, optimum
from radixserve.replay.replay import replay
from radixserve.replay.trace import Trace


class ReplayFigures(msgspec.Struct, frozen=True):
    """What one policy made of a trace in a cache of one size.

    Rates are hit tokens per input token, over all requests: of the policy, of the best eviction that knows the future,
    and of a cache that never evicts. sessions: None for a trace with times of its own.
    miss_amplification: missed tokens per token that the optimum misses. prefill_amplification: computed tokens per
    token that a cache which never evicts computes. 1 is the best of both.
    """

    trace: str
    policy: str
    capacity_tokens: int
    sessions: int | None
    hit_rate: float
    optimum_hit_rate: float
    infinite_hit_rate: float
    miss_amplification: float
    prefill_amplification: float


def measure(
    trace: Trace, uses: list[Use], *, policies: Iterable[EvictionPolicy], capacity_tokens: int
) -> Iterator[ReplayFigures]:
    """Replay a trace, of which uses are known, under each policy. Raises ConfigError if a request does not fit.

    A last token that is always computed, as trace.num_reusable_ids has it, is a hit for none of the three. The optimum
    does not plan for that, so it may be short of the best by a token for each prompt that had come before as a whole.
    """
    capacity_ids = capacity_tokens // trace.tokens_per_id
    if trace.max_ids > capacity_ids:
        raise ConfigError(
            f"--capacity-tokens is {capacity_tokens}; the longest request of {trace.name} has "
            f"{trace.max_ids * trace.tokens_per_id} tokens, which must fit"
        )
    optimum_hit_rate = _rate(trace, optimum(uses, capacity_ids))
    infinite_hit_rate = _rate(trace, [use.num_known for use in uses])
    for policy in policies:
        hit_rate = _rate(trace, replay(trace, capacity_ids, policy))
        yield ReplayFigures(
            trace=trace.name,
            policy=policy,
            capacity_tokens=capacity_tokens,
            sessions=trace.num_sessions,
            hit_rate=hit_rate,
            optimum_hit_rate=optimum_hit_rate,
            infinite_hit_rate=infinite_hit_rate,
            miss_amplification=(1 - hit_rate) / (1 - optimum_hit_rate),
            prefill_amplification=(1 - hit_rate) / (1 - infinite_hit_rate),
        )


def _rate(trace: Trace, num_hits: list[int]) -> float:
    requests = zip(trace.requests, num_hits, strict=True)
    return sum(min(num_hit, trace.num_reusable_ids(request)) for request, num_hit in requests) / trace.num_ids

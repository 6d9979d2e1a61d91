"""Small traces, made at random from a seed."""

import random
from array import array
from collections.abc import Sequence

from radixserve.replay.trace import Trace, TracedRequest


def trace_of(prompts: Sequence[Sequence[int]], *, tokens_per_id: int = 16, namespaces: int = 1) -> Trace:
    """Return a trace of prompts, in turn in each of some namespaces."""
    requests = [TracedRequest(bytes([i % namespaces]), array("i", prompt)) for i, prompt in enumerate(prompts)]
    return Trace("made up", tokens_per_id, requests, num_sessions=None)


def random_prompts(source: random.Random, *, count: int, max_length: int, num_ids: int) -> list[list[int]]:
    """Return prompts that often share a prefix, are one of another, or are the same."""
    return [source.choices(range(num_ids), k=source.randint(1, max_length)) for _ in range(count)]

"""What the cache holds of a prompt, and what became of the rest."""

from array import array
from itertools import islice

import numpy as np

from radixserve.core.kv_cache import KVCache
from radixserve.core.namespace import without_salt
from radixserve.core.other_prompts import Continuations
from radixserve.core.radix_tree import Match
from radixserve.core.sequence import Request, Sequence
from radixserve.protocol import MAX_OTHER_TOKENS, ExplainPrompt, OtherPrompt, PromptFacts
from radixserve.sampling_params import SamplingParams

# Of the tenant's newest roots: those seen, and of these the namespaces that are looked into.
MAX_ROOTS = 4096
MAX_NAMESPACES = 64
# Blocks hashed to look in them: some ten milliseconds.
MAX_HASHED_BLOCKS = 2**14


def explain(cache: KVCache, command: ExplainPrompt) -> PromptFacts:
    """Return the facts. Pure, and bounded in time beside what a lookup of the prompt takes."""
    token_ids = array("i")
    token_ids.frombytes(command.token_ids)
    sequence = _sequence(token_ids, command.namespace)
    num_hit_tokens = cache.match(sequence).num_tokens
    num_common_tokens, others = _others(cache, sequence, num_hit_tokens)
    return PromptFacts(
        num_tokens=len(token_ids),
        num_hit_tokens=num_hit_tokens,
        num_common_tokens=num_common_tokens,
        lost=cache.lost.behind(sequence, num_hit_tokens),
        others=others,
        num_tokens_elsewhere=_num_tokens_elsewhere(cache, sequence) if command.sees_other_namespaces else 0,
        num_stored_tokens=_num_stored_tokens(cache, sequence, num_hit_tokens),
    )


def _others(cache: KVCache, sequence: Sequence, num_hit_tokens: int) -> tuple[int, list[OtherPrompt]]:
    """Return how many tokens cached prompts share with a sequence at most, and what these hold behind its hit."""
    size, use = cache.block_size, cache.use
    found = _find(cache, sequence)
    num_blocks = len(found.block_ids)
    path = cache.keys.path_of(sequence)
    if num_blocks < path.num_public_blocks:
        # What other public prefixes hold is no prompt of the namespace.
        return found.num_tokens, []
    rest = np.frombuffer(sequence.token_ids, np.int32)[num_blocks * size :]
    continuations = Continuations(cache.tree.place(path, found.block_ids, num_blocks, b""), rest, size, use)
    num_common_tokens = max(num_blocks * size + continuations.num_common, num_hit_tokens)
    # The hit may end before the place, as a prompt's last token is never read; or behind it, inside a block.
    above = sequence.token_ids[num_hit_tokens : num_blocks * size]
    num_inside = max(num_hit_tokens - num_blocks * size, 0)
    others = [
        OtherPrompt(
            token_ids=(above + token_ids[num_inside:]).tobytes(),
            seconds_idle=0.0 if cache.num_holders(last_block) else use.seconds_idle(last_block),
            num_requests_hit=use.num_hits(first_block),
        )
        for token_ids, first_block, last_block in continuations.take(MAX_OTHER_TOKENS - len(above) + num_inside)
        if num_blocks * size + len(token_ids) > num_common_tokens
    ]
    return num_common_tokens, sorted(others, key=lambda other: other.seconds_idle)


def _num_tokens_elsewhere(cache: KVCache, sequence: Sequence) -> int:
    """Return the longest match of a sequence in namespaces that differ from its own in nothing but the salt."""
    own = sequence.request.namespace
    roots = islice(cache.tree.roots_of(sequence.request.tenant), MAX_ROOTS)
    namespaces = dict.fromkeys(root.namespace for root in roots if without_salt(root.namespace) == without_salt(own))
    namespaces.pop(own, None)
    longest = num_hashed_blocks = 0
    for namespace in islice(namespaces, MAX_NAMESPACES):
        if longest == sequence.num_tokens or num_hashed_blocks > MAX_HASHED_BLOCKS:
            break
        twin = _sequence(sequence.token_ids, namespace)
        longest = max(longest, _find(cache, twin).num_tokens)
        num_hashed_blocks += len(twin.digests)
    return longest


def _num_stored_tokens(cache: KVCache, sequence: Sequence, num_hit_tokens: int) -> int:
    """Return how many of a sequence's tokens right behind its hit a lower tier has."""
    if cache.store is None:
        return 0
    first, end = num_hit_tokens // cache.block_size, sequence.num_reusable_tokens // cache.block_size
    index = first
    while index < end and cache.store.contains(cache.keys.name_of(sequence, index)):
        index += 1
    return max(index * cache.block_size - num_hit_tokens, 0)


def _sequence(token_ids: "array[int]", namespace: bytes) -> Sequence:
    """Return what a request of a prompt would be looked up as."""
    return Sequence(Request("", SamplingParams(), namespace, len(token_ids), seed=0), 0, token_ids)


def _find(cache: KVCache, sequence: Sequence) -> Match:
    """Return the longest cached prefix of a sequence, its last token included."""
    tokens = np.frombuffer(sequence.token_ids, np.int32)
    return cache.tree.find(cache.keys.path_of(sequence), tokens, lambda index: cache.keys.digest_of(sequence, index))

"""How a K/V cache behaves, beside its size."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixserve.config import EvictionPolicy
from radixserve.core.block_store import BlockStore
from radixserve.core.radix_tree import BlockDigest, xxh3_digest


@dataclass(slots=True, frozen=True, kw_only=True)
class CacheSettings:
    """Settings of a KVCache.

    prefix_cache: whether what one sequence computed is found by others.
    public_prefixes: token ids, each of whole blocks. The blocks of the longest one that a prompt begins with are shared
    by all namespaces that differ in their tenant alone; what lies behind them, and all else, by equal namespaces only.
    build: what K/V depends on beside the tokens; it is part of the blocks' names.
    digest: finds blocks; it may collide, as token ids are compared before a block is shared.
    max_lost_blocks: evicted ones that are remembered, to explain a miss; in 10 MB, about 4 million tokens.
    clock: seconds, from any beginning on.
    store: where blocks go that the pool has no room for, and come back from.
    max_pinned_share: of the blocks that pins may keep, from 0 to 1.
    """

    prefix_cache: bool = True
    eviction_policy: EvictionPolicy = "learned-reuse"
    public_prefixes: Sequence[Sequence[int]] = ()
    build: bytes = b""
    digest: BlockDigest = xxh3_digest
    max_lost_blocks: int = 2**18
    clock: Callable[[], float] = time.monotonic
    store: BlockStore | None = None
    max_pinned_share: float = 0.25

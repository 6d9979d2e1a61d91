"""An AsyncEngine over a stub model, in this process: what the API's tests talk to."""

import time
from collections.abc import Callable
from typing import Any

from radixserve.config import EngineConfig
from radixserve.core.block_store import BlockStore
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.async_engine import AsyncEngine, load_public_prefixes
from radixserve.engine.client import EngineClient
from radixserve.engine.core import EngineCore
from radixserve.engine.in_process import InProcessClient
from radixserve.engine.start import StartedEngine
from radixserve.protocol import EngineReady
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.stub import StubExecutor, Table


def stub_engine(
    tokenizer: Tokenizer,
    table: Table,
    *,
    config: EngineConfig | None = None,
    num_blocks: int = 64,
    max_model_len: int = 512,
    cache_type: type[KVCache] = KVCache,
    clock: Callable[[], float] = time.monotonic,
    make_client: Callable[[Callable[[], StartedEngine]], EngineClient] = InProcessClient,
    store: BlockStore | None = None,
    **stub: Any,
) -> AsyncEngine:
    """Return an engine, not started, whose model is a table. Sizes not given come from config; clock: the cache's."""
    settings = config or EngineConfig()

    def start() -> StartedEngine:
        executor = StubExecutor(
            table, vocab_size=tokenizer.vocab_size, num_blocks=num_blocks, block_size=settings.block_size, **stub
        )
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens or 256,
            max_model_len=max_model_len,
            end_token_ids=tokenizer.eos_token_ids,
            schedule_policy=settings.schedule_policy,
        )
        cache = cache_type(
            num_blocks,
            settings.block_size,
            CacheSettings(
                prefix_cache=not settings.no_prefix_cache,
                public_prefixes=load_public_prefixes(settings, tokenizer),
                eviction_policy=settings.eviction_policy,
                max_pinned_share=settings.max_pinned_share,
                clock=clock,
                store=store,
            ),
        )
        core = EngineCore(executor, tokenizer, cache, limits, max_queued_requests=settings.max_queued_requests)
        ready = EngineReady(
            model_name="stub",
            architecture="Stub",
            weights_dtype="float32",
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            attention_backend="torch",
            num_threads=1,
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            bytes_per_block=0,
            load_seconds=0.0,
            notices=[],
            stats=core.stats(),
        )
        return StartedEngine(core, ready)

    return AsyncEngine(settings, lambda _: make_client(start), tokenizer=tokenizer)

"""Put an engine together from its settings."""

import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from radixserve.config import EngineConfig
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.async_engine import load_tokenizer
from radixserve.engine.core import EngineCore
from radixserve.engine.store import open_store
from radixserve.events.start import follow, open_publisher
from radixserve.model_path import resolve_model_path
from radixserve.protocol import EngineReady
from radixserve.runner.startup import start_executor
from radixserve.tiers.cache_directory import check_directory
from radixserve.tiers.identity import weights_digest
from radixserve.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class StartedEngine:
    """An engine and what it says of itself."""

    core: EngineCore
    ready: EngineReady


def start_engine(
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    *,
    public_prefixes: "Sequence[array[int]]" = (),
    show_progress: bool,
) -> StartedEngine:
    """Load the model, allocate the cache and return the engine. Raises ConfigError.

    tokenizer: one that is loaded already, else it is loaded here. public_prefixes: as KVCache takes them; their file,
    which config names, is not read here.
    """
    began = time.monotonic()
    path = resolve_model_path(config.model)
    if tokenizer is None:
        tokenizer = load_tokenizer(config)
    # Before the model is loaded, so that a directory or an address in use is found at once.
    if config.kv_cache_dir is not None:
        check_directory(Path(config.kv_cache_dir))
    publisher = open_publisher(config)
    try:
        with ThreadPoolExecutor(max_workers=1) as worker:
            # The files are read for both at once.
            weights = worker.submit(weights_digest, path) if config.kv_cache_dir is not None else None
            started = start_executor(config, show_progress=show_progress)
            store, build = open_store(config, started, lambda: weights.result() if weights is not None else b"")
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    notices = list(started.notices)
    # Every running sequence advances in every step, so a step must have a token for each.
    max_num_seqs = min(config.max_num_seqs, started.max_num_batched_tokens)
    if max_num_seqs < config.max_num_seqs:
        notices.append(f"max_num_seqs is {max_num_seqs}: a step of max_num_batched_tokens has no room for more")
    num_unused = sum(len(prefix) >= started.max_model_len for prefix in public_prefixes)
    if num_unused:
        notices.append(f"{num_unused} public prefixes leave no room in max_model_len, so no prompt begins with them")
    cache = KVCache(
        started.num_blocks,
        config.block_size,
        CacheSettings(
            prefix_cache=not config.no_prefix_cache,
            eviction_policy=config.eviction_policy,
            public_prefixes=public_prefixes,
            max_pinned_share=config.max_pinned_share,
            build=build,
            store=store,
        ),
    )
    core = EngineCore(
        started.executor,
        tokenizer,
        cache,
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=started.max_num_batched_tokens,
            max_model_len=started.max_model_len,
            end_token_ids=tokenizer.eos_token_ids.union(started.eos_token_ids),
            schedule_policy=config.schedule_policy,
        ),
        max_queued_requests=config.max_queued_requests,
        seed=config.seed,
    )
    if publisher is not None:
        core.publish_events(follow(cache, publisher, config, device=started.device))
    ready = EngineReady(
        model_name=path.stem if path.suffix == ".gguf" else path.resolve().name,
        architecture=started.architecture,
        weights_dtype=started.weights_dtype,
        dtype=started.dtype,
        kv_cache_dtype=started.kv_cache_dtype,
        device=started.device,
        attention_backend=started.attention_backend,
        num_threads=started.num_threads,
        max_model_len=started.max_model_len,
        vocab_size=started.vocab_size,
        block_size=config.block_size,
        num_blocks=started.num_blocks,
        bytes_per_block=started.bytes_per_block,
        load_seconds=time.monotonic() - began,
        notices=notices,
        stats=core.stats(),
    )
    return StartedEngine(core, ready)

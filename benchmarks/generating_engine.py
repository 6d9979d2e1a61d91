"""An engine of the demo model in this process, whose requests all generate: what benchmarks of decode steps drive."""

from array import array
from collections.abc import Callable

import torch

from radixserve.config import EngineConfig
from radixserve.core.block_store import BlockStore
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.async_engine import load_tokenizer
from radixserve.engine.core import EngineCore
from radixserve.protocol import AddRequest
from radixserve.runner.executor import Executor
from radixserve.runner.startup import start_executor
from radixserve.sampling_params import SamplingParams

BLOCK_SIZE = 16


def generating_engine(
    num_rows: int,
    num_prompt_tokens: int,
    num_steps: int,
    *,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
    make_store: Callable[[int], BlockStore] | None = None,
) -> EngineCore:
    """Return an engine whose num_rows greedy requests of random prompts generate in each of the next num_steps steps.

    wrap: what to put around the executor. make_store: makes the store below the cache, for blocks of so many bytes.
    """
    # The first rows generate while the prompts of the last ones are computed, some rows' in a step.
    max_model_len = num_prompt_tokens + num_steps + 8 * num_rows
    settings = EngineConfig(num_kv_blocks=num_rows * (-(-max_model_len // BLOCK_SIZE) + 1), max_model_len=max_model_len)
    started = start_executor(settings, show_progress=False)
    tokenizer = load_tokenizer(settings)
    store = None if make_store is None else make_store(started.bytes_per_block)
    core = EngineCore(
        wrap(started.executor),
        tokenizer,
        KVCache(started.num_blocks, BLOCK_SIZE, CacheSettings(store=store)),
        SchedulerLimits(
            max_num_seqs=num_rows,
            max_num_batched_tokens=started.max_num_batched_tokens,
            max_model_len=max_model_len,
            end_token_ids=tokenizer.eos_token_ids,
        ),
        max_queued_requests=num_rows,
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_model_len, ignore_eos=True)
    prompts = torch.randint(100, started.vocab_size, (num_rows, num_prompt_tokens)).tolist()
    for index, prompt in enumerate(prompts):
        core.add(AddRequest(str(index), array("i", prompt).tobytes(), params))
    while len(core.step().deltas) < num_rows:
        pass
    return core

"""An engine driven step by step, without a process or an event loop."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import SchedulePolicy
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.engine.answer import GenerationResult
from radixserve.engine.core import EngineCore
from radixserve.protocol import AddRequest, EngineStats, Failure, PinAt, ResetCache
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.stub import StubExecutor, Table

BLOCK_SIZE = 16
CACHE_SETTINGS = {field.name for field in fields(CacheSettings)}


def ids(start: int, count: int) -> list[int]:
    """Return a prompt of count tokens; different starts give prompts with different first tokens."""
    return [(start + 7 * i) % 200 for i in range(count)]


class Harness:
    """Adds requests, runs steps, and collects what each request got. options: of the cache, and of the stub."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: Table,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = 512,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_queued_requests: int = 64,
        schedule_policy: SchedulePolicy = "cache-aware",
        cache_type: type[KVCache] = KVCache,
        **options: Any,
    ) -> None:
        settings = {name: options.pop(name) for name in CACHE_SETTINGS & options.keys()}
        self.executor = StubExecutor(
            table, vocab_size=tokenizer.vocab_size, num_blocks=num_blocks, block_size=block_size, **options
        )
        self.core = EngineCore(
            self.executor,
            tokenizer,
            cache_type(num_blocks, block_size, CacheSettings(**settings)),
            SchedulerLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                end_token_ids=tokenizer.eos_token_ids,
                schedule_policy=schedule_policy,
            ),
            max_queued_requests=max_queued_requests,
        )
        self._max_num_batched_tokens = max_num_batched_tokens
        self.results: dict[str, GenerationResult] = {}
        self.failures: dict[str, Failure] = {}
        self._num_added = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        namespace: bytes = b"",
        priority: int = 0,
        pins: Sequence[PinAt] = (),
        **params: Any,
    ) -> str:
        """Queue a greedy request, unless params say otherwise, and return its id."""
        settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params})
        return self.submit(prompt, settings, namespace=namespace, priority=priority, pins=pins)

    def add_beams(
        self,
        prompt: Sequence[int],
        *,
        namespace: bytes = b"",
        priority: int = 0,
        pins: Sequence[PinAt] = (),
        **params: Any,
    ) -> str:
        """Queue a beam search and return its id."""
        settings = BeamSearchParams(**{"max_tokens": 4, **params})
        return self.submit(prompt, settings, namespace=namespace, priority=priority, pins=pins)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        namespace: bytes = b"",
        priority: int = 0,
        tool_call_begin: str | None = None,
        pins: Sequence[PinAt] = (),
    ) -> str:
        """Queue a request and return its id."""
        request_id = f"r{self._num_added}"
        self._num_added += 1
        self.results[request_id] = GenerationResult.empty(list(prompt), params.num_returned)
        packed_ids = array("i", prompt).tobytes()
        self.core.add(AddRequest(request_id, packed_ids, params, namespace, priority, tool_call_begin, list(pins)))
        return request_id

    def step(self) -> None:
        """Run one step and check that it keeps to its budget and that no block is lost."""
        num_computed_tokens = self.stats.num_computed_tokens
        output = self.core.step()
        assert output.stats.num_computed_tokens - num_computed_tokens <= self._max_num_batched_tokens
        cache = output.stats.cache
        assert cache.num_free_blocks + cache.num_cached_blocks + cache.num_in_use_blocks == cache.num_blocks
        for delta in output.deltas:
            if delta.failure is not None:
                self.failures[delta.request_id] = delta.failure
            else:
                self.results[delta.request_id].add(delta)

    def run(self, max_steps: int = 2000) -> None:
        """Run until nothing is left to do; afterwards no request may hold a block."""
        for _ in range(max_steps):
            if self.core.has_work:
                self.step()
            elif not self.stats.num_waiting:  # who waits, with nothing to do, waits for a tier
                break
        assert not self.core.has_work, f"still busy after {max_steps} steps"
        assert self.stats.cache.num_in_use_blocks == 0

    def ask(self, prompt: Sequence[int], **params: Any) -> GenerationResult:
        """Queue a request, run until idle, and return its result."""
        return self.result_of(self.add(prompt, **params))

    def search(self, prompt: Sequence[int], **params: Any) -> GenerationResult:
        """Queue a beam search, run until idle, and return its result."""
        return self.result_of(self.add_beams(prompt, **params))

    def result_of(self, request_id: str) -> GenerationResult:
        """Run until idle, and return the result of a request that must have succeeded."""
        self.run()
        assert request_id not in self.failures, self.failures[request_id]
        return self.results[request_id]

    def reset_cache(self) -> None:
        """Drop all cached blocks."""
        self.core.control(ResetCache())

    @property
    def stats(self) -> EngineStats:
        return self.core.stats()


MakeHarness = Callable[..., Harness]

"""A scheduler without a model: every token of an answer is the request's own, and starts are written down."""

from array import array
from collections.abc import Sequence as Tokens
from typing import Any

from radixserve.config import SchedulePolicy
from radixserve.core.batch import SampledTokens, ScheduledBatch
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.core.namespace import encode_namespace
from radixserve.core.radix_tree import BlockDigest, xxh3_digest
from radixserve.core.scheduler import Scheduler, SchedulerLimits
from radixserve.core.sequence import Request, Sequence
from radixserve.sampling_params import SamplingParams

BLOCK_SIZE = 4


class Scheduling:
    """Runs a Scheduler. requests: all, in the order in which they came; starts: in the order of their first step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        schedule_policy: SchedulePolicy = "cache-aware",
        digest: BlockDigest = xxh3_digest,
    ) -> None:
        self.cache = KVCache(num_blocks, BLOCK_SIZE, CacheSettings(digest=digest))
        self.scheduler = Scheduler(
            self.cache,
            SchedulerLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=num_blocks * BLOCK_SIZE,
                end_token_ids=frozenset(),
                schedule_policy=schedule_policy,
            ),
        )
        self.requests: list[Request] = []
        self.starts: list[Request] = []
        self.num_computed_tokens = 0

    def add(self, prompt: Tokens[int], *, priority: int = 0, tenant: str | None = None, **params: Any) -> Request:
        """Queue a request for one token, unless params say otherwise."""
        token_ids = array("i", prompt)
        settings = SamplingParams(**{"max_tokens": 1, **params})
        namespace = encode_namespace(tenant=tenant)
        request = Request(str(len(self.requests)), settings, namespace, len(token_ids), seed=0, priority=priority)
        request.sequences.append(Sequence(request, 0, token_ids))
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledBatch:
        """Run one step and check that no block is lost."""
        batch = self.scheduler.schedule()
        owners = {id(sequence.block_table): request for request in self.requests for sequence in request.sequences}
        started = [owners[id(row.block_table)] for row in batch.rows]
        self.starts += [request for request in dict.fromkeys(started) if request not in self.starts]
        slots = [slot for row in batch.rows for slot in row.samples]
        token_ids = [1000 + slot.choice_index for slot in slots]
        self.num_computed_tokens += batch.num_tokens
        self.scheduler.update(batch, SampledTokens(token_ids, [None] * len(slots), [True] * len(batch.rows)))
        stats = self.cache.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_in_use_blocks == stats.num_blocks
        return batch

    def run(self, max_steps: int = 2000) -> None:
        """Run until nothing is left to do; afterwards no request may hold a block."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"still busy after {max_steps} steps"
        assert all(request.is_finished for request in self.requests)
        assert self.cache.stats().num_in_use_blocks == 0

    def num_overtaken(self, request: Request) -> int:
        """How many requests that came after this one started before it."""
        came, started = self.requests.index(request), self.starts.index(request)
        return sum(self.requests.index(other) > came for other in self.starts[:started])


def own(request_number: int, num_tokens: int) -> list[int]:
    """Tokens that no other request number has."""
    return [10_000 * (request_number + 1) + position for position in range(num_tokens)]

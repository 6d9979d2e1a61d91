"""The places below the pool: what goes down, what comes back, and what is written to be there after a restart."""

from array import array

import msgspec

from radixserve.core.batch import BlockLoads, SampledTokens, ScheduledBatch
from radixserve.core.block_store import BlockStore
from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.sequence import Sequence
from radixserve.core.tiers.block_names import BlockNames
from radixserve.core.tiers.loading import Loads
from radixserve.core.tiers.saving import Save
from radixserve.core.tiers.spilling import Spills
from radixserve.protocol import SaveProgress, TierStats

# What one step copies out for a save: little beside what a step computes, and more where it computes nothing.
MAX_SAVED_BYTES_BUSY = 2 * 2**20
MAX_SAVED_BYTES_IDLE = 32 * 2**20
# How often an engine that has nothing else to do looks for what was read or written: at first, and when nothing comes.
MIN_POLL_SECONDS = 0.002
MAX_POLL_SECONDS = 0.02
# How much the last step counts in the measured time of computing.
_WEIGHT = 0.2


class CacheTiers:
    """What a scheduler does with a store below its cache.

    In each step: schedule_loads, choose the rows, schedule_spills, run the batch, then finish; or fail.
    """

    def __init__(self, cache: KVCache, store: BlockStore) -> None:
        self._cache = cache
        self._store = store
        self._clock = cache.clock
        self._names = BlockNames(cache.num_blocks, cache.keys)
        self._spills = Spills(store, self._names)
        cache.add_observer(self._spills)
        cache.add_observer(self._names)
        self._loads = Loads(cache, store, self._names)
        self._save: Save | None = None
        self._polled_at = 0.0
        self._poll_seconds = MIN_POLL_SECONDS

    @property
    def is_under_way(self) -> bool:
        """Whether steps are needed for what is being read, or is still to be saved."""
        return self._loads.is_under_way or (self._save is not None and not self._save.is_collected)

    @property
    def seconds_until_poll(self) -> float | None:
        """For how long an engine without other work can wait for a store; None if for nothing of it."""
        return max(self._polled_at + self._poll_seconds - self._clock(), 0.0) if self.is_under_way else None

    def awaits(self, sequence: Sequence, match: Match) -> bool:
        """Whether a sequence whose turn it is, and of which match is cached, is to wait for blocks that are read."""
        return self._loads.awaits(sequence, match)

    def prefetch(self, sequence: Sequence, match: Match) -> None:
        """Read what is to be read behind match for a sequence that begins to wait for its turn."""
        self._loads.prefetch(sequence, match)

    def schedule_loads(self, num_spare_blocks: int, *, is_busy: bool) -> BlockLoads | None:
        """Return what the step copies into the pool.

        num_spare_blocks: how many nobody who runs is going to need. is_busy: the step computes something too.
        """
        self._polled_at = self._clock()
        loads = self._loads.schedule(num_spare_blocks, is_busy=is_busy)
        has_come = loads is not None or not self.is_under_way
        self._poll_seconds = MIN_POLL_SECONDS if has_come else min(2 * self._poll_seconds, MAX_POLL_SECONDS)
        return loads

    def schedule_spills(self, *, is_busy: bool) -> "array[int]":
        """Return what the step copies out of the pool, once all room is allocated. is_busy: it computes something."""
        if self._save is not None and not self._save.is_collected:
            num_bytes = MAX_SAVED_BYTES_BUSY if is_busy else MAX_SAVED_BYTES_IDLE
            if self._save.collect(max(num_bytes // self._store.block_bytes, 1)):
                self._poll_seconds = MIN_POLL_SECONDS
        return self._spills.block_ids()

    def finish(self, sampled: SampledTokens) -> None:
        """Take in that the step was run."""
        self._spills.finish(sampled.spilled)
        self._loads.finish()

    def fail(self) -> None:
        """Take in that the step was lost, and all that it should have copied."""
        self._spills.finish(None)
        self._loads.finish(has_failed=True)

    def reset(self, tenant: str | None) -> None:
        """Let nothing of a tenant's, or of anyone's if that is None, come back that is on its way; between steps."""
        self._loads.reset(tenant)

    def record_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from a step how long computing a block takes, if it was mostly prompts that it computed."""
        if batch.num_tokens < self._cache.block_size * len(batch.rows) or not batch.rows:
            return
        rate = seconds / batch.num_tokens * self._cache.block_size
        known = self._loads.compute_rate
        self._loads.compute_rate = rate if known is None else known + _WEIGHT * (rate - known)

    def save(self, *, begins: bool) -> SaveProgress:
        """Tell how far a save is: a new one, of all that is cached now, if it begins; otherwise the last one.

        Nobody need ask to the end: what one who left has begun says nothing of what was cached since.
        """
        if begins or self._save is None:
            self._save = Save(self._cache, self._store, self._names, self._spills)
        return self._save.progress()

    def stats(self) -> list[TierStats]:
        """Return the figures of each tier; what was evicted when their queues were full counts as dropped by each."""
        num_dropped = self._spills.num_dropped
        return [
            msgspec.structs.replace(tier, num_dropped_blocks=tier.num_dropped_blocks + num_dropped)
            for tier in self._store.stats_of_stores()
        ]

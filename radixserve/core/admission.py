"""Who of the waiting starts in a step."""

import time

from radixserve.core.beam_schedule import BeamSchedule
from radixserve.core.kv_cache import KVCache
from radixserve.core.running import RunningSequences
from radixserve.core.sequence import Sequence
from radixserve.core.tenant_queues import TenantQueues
from radixserve.core.units import is_generating_beam, num_reserved_places


class Admission:
    """Lets waiting sequences run, in the order of their queues, as far as places, blocks and budget go.

    num_started: requests that have begun to run. queue_seconds: how long they waited for that, added up.
    num_overtakes: how often a request had one of its tenant and priority that came later start before it.
    """

    def __init__(
        self,
        cache: KVCache,
        waiting: TenantQueues,
        running: RunningSequences,
        beams: BeamSchedule,
        *,
        max_num_seqs: int,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._beams = beams
        self._max_num_seqs = max_num_seqs
        self.num_started = 0
        self.queue_seconds = 0.0
        self.num_overtakes = 0

    def admit(self, scheduled: list[tuple[Sequence, int]], budget: int) -> None:
        """Add to scheduled, which holds the rows of those that run, what newcomers compute in this step."""
        num_free_places = self._max_num_seqs - sum(map(num_reserved_places, self._running.units()))
        # Everyone needs a block at least, so a step that can admit nobody looks up nothing.
        if not budget or not num_free_places or self._running.num_spare_blocks() <= 0:
            return
        being_computed = {self._next_block(sequence) for sequence, num_tokens in scheduled if num_tokens > 1}
        for sequence, match in self._waiting.candidates():
            num_places = num_reserved_places(sequence)
            if not budget or num_places > num_free_places:
                return
            num_found = len(match.block_ids)
            digest = self._cache.next_digest(sequence, num_found)
            namespace = self._cache.namespace_of(sequence, num_found)
            # One that scores its prompt computes the block in any case.
            can_wait = match.num_tokens < sequence.num_reusable_tokens
            if digest is not None and (namespace, digest) in being_computed and can_wait:
                # A prompt computes this very block in this step. To wait costs one step; if the block is not there
                # then, because the step failed or its writer was cancelled, this one computes it.
                continue
            if not self._running.leaves_room_for(sequence, match):
                return
            if is_generating_beam(sequence):
                rows = self._beams.resume(sequence, budget)
                if not rows:
                    return
            else:
                num_tokens = min(sequence.num_tokens - match.num_tokens, budget)
                if not self._cache.allocate(sequence, num_tokens, match):
                    return
                self._start(sequence)
                rows = [(sequence, num_tokens)]
                being_computed.add(self._next_block(sequence))
            scheduled += rows
            num_free_places -= num_places
            budget -= sum(num_tokens for _, num_tokens in rows)

    def _start(self, sequence: Sequence) -> None:
        request = sequence.request
        num_ahead = self._waiting.num_new_ahead(sequence)
        self._waiting.start(sequence)
        if not request.has_started:
            self.num_overtakes += num_ahead
            self.num_started += 1
            self.queue_seconds += time.monotonic() - request.queued_at
            request.num_cached_tokens = sequence.num_computed_tokens
            self._cache.record_query(request.tenant, request.num_prompt_tokens, sequence.num_computed_tokens)
        self._running.add(sequence)

    def _next_block(self, sequence: Sequence) -> tuple[bytes, bytes | None]:
        """Return what tells the block that a sequence computes next, if it computes a full one.

        The namespace is in the digest already; but a digest can be forged, and must not delay another tenant.
        """
        num_blocks = sequence.num_committed_blocks
        return self._cache.namespace_of(sequence, num_blocks), self._cache.next_digest(sequence, num_blocks)

"""Who of the waiting starts in a step."""

import time

from radixserve.core.beam_schedule import BeamSchedule
from radixserve.core.in_flight import InFlightBlocks
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
        max_num_batched_tokens: int,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._beams = beams
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.num_started = 0
        self.queue_seconds = 0.0
        self.num_overtakes = 0

    def admit(self, scheduled: list[tuple[Sequence, int]], budget: int) -> None:
        """Add to scheduled, which holds the rows of those that run, what newcomers compute in this step."""
        num_free_places = self._max_num_seqs - sum(map(num_reserved_places, self._running.units()))
        # A step that can admit nobody looks up nothing.
        if not self._waiting or not budget or not num_free_places or not self._running.may_have_room():
            return
        in_flight = InFlightBlocks(self._cache, self._max_num_batched_tokens)
        for sequence, num_tokens in scheduled:
            in_flight.add(sequence, num_tokens)
        for sequence, match in self._waiting.candidates():
            num_places = num_reserved_places(sequence)
            if not budget or num_places > num_free_places:
                return
            if in_flight.let_step_pass(sequence, match):
                continue
            if not self._running.leaves_room_for(sequence, match):
                return
            if self._waiting.awaits_blocks(sequence, match):
                continue
            if is_generating_beam(sequence):
                rows = self._beams.resume(sequence, budget)
                if not rows:
                    return
            else:
                num_tokens = min(sequence.num_tokens - match.num_tokens, budget)
                if not self._running.make_room_for_new(sequence, num_tokens, match):
                    return
                self._start(sequence)
                rows = [(sequence, num_tokens)]
                in_flight.add(sequence, num_tokens)
            sequence.num_steps_let_pass = 0
            sequence.load_wait = None
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

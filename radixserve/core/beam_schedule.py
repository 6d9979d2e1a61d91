"""How beam groups that have generated tokens run: one step for all beams, and the way back after a preemption.

The beams of a group are one to the scheduler: they run, wait and give up their blocks together. After a preemption
they are computed again one after another, each but for its last token; those are computed in one step, in which all
beams bring their candidates.
"""

from collections import deque

from radixserve.core.beam_members import count_blocks, fork_and_release, resume_order
from radixserve.core.kv_cache import KVCache
from radixserve.core.running import RunningSequences
from radixserve.core.sequence import Request, Sequence, SequenceStatus
from radixserve.core.tenant_queues import TenantQueues
from radixserve.core.units import is_behind


class BeamSchedule:
    """Chooses the tokens that groups compute, makes room for them, and forks and releases their beams."""

    def __init__(self, cache: KVCache, waiting: TenantQueues, running: RunningSequences) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running

    def schedule(self, request: Request, budget: int, queue: deque[Sequence]) -> list[tuple[Sequence, int]]:
        """Return the beams that a group's next step computes, each with how many tokens; none if it gets no step.

        queue: those that may have to give way, as in RunningSequences.make_room.
        """
        beams = request.sequences
        if budget < len(beams):
            return []
        if is_behind(beams[0]):
            for beam in resume_order(beams):
                if not self._unpark(beam, queue):
                    return []
                num_tokens = min(beam.num_uncomputed_tokens - 1, budget)
                if num_tokens > 0:
                    return [(beam, num_tokens)] if self._running.make_room(beam, num_tokens, queue) else []
        return [(beam, 1) for beam in beams] if self._make_room_for_one_each(request, queue) else []

    def resume(self, sequence: Sequence, budget: int) -> list[tuple[Sequence, int]]:
        """Let the group that a sequence waits for run again; return as schedule does, nothing if it still waits."""
        if budget < len(sequence.request.sequences):
            return []
        self._waiting.remove(sequence)
        sequence.status = SequenceStatus.PARKED
        return self.schedule(sequence.request, budget, deque())

    def select(self, request: Request, candidates: list[list[tuple[int, float]]]) -> None:
        """Fork and release beams as their candidates demand, unless that ends the search: then its group is done."""
        group, beams = request.beam, request.sequences
        assert group is not None
        group.record_blocks(*count_blocks(beams, self._cache.block_size))
        children = group.select([beam.token_ids[request.num_prompt_tokens :] for beam in beams], candidates)
        if not group.is_done:
            fork_and_release(request, children, self._cache)
            self._running.replace_beams(request)

    def _unpark(self, beam: Sequence, queue: deque[Sequence]) -> bool:
        """Let a parked beam run again with what the cache has of it. False: its group gave way."""
        if beam.status is SequenceStatus.PARKED:
            if not self._running.make_room(beam, 0, queue):
                return False
            self._running.add(beam)
        return True

    def _make_room_for_one_each(self, request: Request, queue: deque[Sequence]) -> bool:
        """Make room for the next token of each beam, and count the copies. False: the group gave way."""
        assert request.beam is not None
        for beam in request.sequences:
            block_ids = beam.block_table[:]
            if not self._running.make_room(beam, 1, queue):
                return False
            if beam.block_table[: len(block_ids)] != block_ids:
                request.beam.record_copy()
        return True

"""The sequences that hold blocks, and how they make room for one another."""

from collections import deque
from collections.abc import Iterator

from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.sequence import Request, Sequence, SequenceStatus
from radixserve.core.tenant_queues import TenantQueues
from radixserve.core.units import num_blocks_for, num_blocks_held, one_of_each, unit_of


class RunningSequences:
    """The sequences that hold blocks. Whoever gives up its blocks goes back to its waiting queue.

    num_preemptions: how often that was.
    """

    def __init__(self, cache: KVCache, waiting: TenantQueues) -> None:
        self._cache = cache
        self._waiting = waiting
        self._sequences: list[Sequence] = []
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def units(self) -> list[Sequence]:
        """Return one sequence of each unit."""
        return one_of_each(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence that has blocks."""
        sequence.status = SequenceStatus.RUNNING
        self._sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go and free its blocks; what status it gets is the caller's to say."""
        self._sequences.remove(sequence)
        self._cache.release(sequence)

    def replace_beams(self, request: Request) -> None:
        """Take note that the sequences of a group are others now. Their blocks are not touched."""
        self._sequences = [sequence for sequence in self._sequences if sequence.request is not request]
        self._sequences += request.sequences

    def make_room(self, sequence: Sequence, num_tokens: int, queue: deque[Sequence]) -> bool:
        """Make room for a running or parked sequence's next tokens, at the cost of those in queue, the last one first.

        They come after it in rank and have no place in this step yet. So a scheduled row never loses its blocks, and
        the first in rank never gives way: it advances in every step, and ends; once it is alone, at the cost of pins.
        False: the sequence itself gave way.
        """
        match = self._cache.match(sequence) if sequence.status is SequenceStatus.PARKED else None
        while not self._cache.allocate(sequence, num_tokens, match):
            if not queue and self._is_alone(sequence) and self._cache.break_pins(sequence, num_tokens, match):
                continue
            victim = queue.pop() if queue else sequence
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def make_room_for_new(self, sequence: Sequence, num_tokens: int, match: Match) -> bool:
        """Make room for the first tokens of a waiting sequence, at the cost of nobody who runs.

        At that of pins, if nobody does; but not while a load holds blocks, which it gives back after the step.
        """
        if self._cache.allocate(sequence, num_tokens, match):
            return True
        if self._sequences or self._cache.num_in_use_blocks:
            return False
        return self._cache.break_pins(sequence, num_tokens, match) and self._cache.allocate(sequence, num_tokens, match)

    def preempt(self, sequence: Sequence) -> None:
        """Send a sequence, or the group that it is a beam of, back to wait."""
        # What it computed is committed already, so it finds its own blocks again when it resumes.
        for member in unit_of(sequence):
            if member.status is SequenceStatus.RUNNING:
                self.remove(member)
                member.status = SequenceStatus.PARKED
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)
        self.num_preemptions += 1

    def leaves_room_for(self, sequence: Sequence, match: Match) -> bool:
        """Whether the spare blocks hold all of a sequence's tokens. What it hits is spare too, unless it is held.

        Whoever is admitted into less is soon preempted again: on a pool that is too small for its load this halves the
        preemptions and saves a tenth of all computed tokens, for 5 % more steps.
        """
        num_new_blocks = num_blocks_for(sequence, self._cache.block_size) - self._cache.num_held_blocks(match)
        return not self._sequences or num_new_blocks <= self.num_spare_blocks()

    def may_have_room(self) -> bool:
        """Whether anyone could be admitted: everyone needs a block at least."""
        # Where nobody runs, blocks may be under pins alone.
        return not self._sequences or self.num_spare_blocks() > 0

    def num_spare_blocks(self) -> int:
        """Return the blocks left when everyone who runs keeps the room for all its tokens, a block at least."""
        block_size = self._cache.block_size
        num_kept_blocks = sum(
            max(num_blocks_for(other, block_size) - num_blocks_held(other, block_size), 1) for other in self.units()
        )
        return self._cache.num_available_blocks - num_kept_blocks

    def _is_alone(self, sequence: Sequence) -> bool:
        members = unit_of(sequence)
        return all(other in members for other in self._sequences)

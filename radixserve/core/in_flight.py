"""In-flight sharing: those who come with a prefix in common, none of it cached, compute it once."""

from bisect import bisect_left

from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.sequence import Sequence


class InFlightBlocks:
    """The blocks that one step computes, and which of the waiting let the step pass to find them in the next one.

    If a block is not there then, because the step failed or its writer was cancelled, one that waited computes it.

    *The bound*: when a sequence lets a step pass, it has let no more pass, this one included, than computing all that
    it misses would take at max_num_batched_tokens a step. So of prompts that each go a block further than the one
    before, more than one a step starts; and some of a prefix is computed twice where blocks are shared at several
    depths, by one of those that share the deeper ones. All of it is in the cache after the step.
    """

    def __init__(self, cache: KVCache, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._blocks: set[tuple[bytes, bytes]] = set()
        # The first block that each of those who let the step pass is going to miss in the next one.
        self._missed_next: set[tuple[bytes, bytes]] = set()

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Take in that the step computes a sequence's next num_tokens tokens."""
        num_full = (sequence.num_computed_tokens + num_tokens) // self._cache.block_size
        for index in range(sequence.num_committed_blocks, num_full):
            block = self._block(sequence, index)
            if block is not None:
                self._blocks.add(block)

    def let_step_pass(self, sequence: Sequence, match: Match) -> bool:
        """Whether a sequence that could start waits for blocks of the step, and if so, count that.

        match: what the cache has of it.
        """
        # Who scores its prompt computes the block in any case.
        if match.num_tokens >= sequence.num_reusable_tokens:
            return False
        first = len(match.block_ids)
        last = min(sequence.num_tokens // self._cache.block_size, first + len(self._blocks))
        # Who computes a block computes or has all those above it.
        end = first + bisect_left(
            range(first, last), True, key=lambda index: self._block(sequence, index) not in self._blocks
        )
        num_missing_tokens = sequence.num_tokens - match.num_tokens
        num_tokens_to_pass = num_missing_tokens - sequence.num_steps_let_pass * self._max_num_batched_tokens
        if end == first or num_tokens_to_pass <= 0:
            return False
        missed = self._block(sequence, end)
        if missed is not None:
            if missed in self._missed_next and num_tokens_to_pass <= self._max_num_batched_tokens:
                # Another is going to compute that block in the next step, for which this one could not wait again. To
                # start now costs what is computed twice once, however many more there are of the kind.
                return False
            self._missed_next.add(missed)
        sequence.num_steps_let_pass += 1
        return True

    def _block(self, sequence: Sequence, index: int) -> tuple[bytes, bytes] | None:
        """Return what tells a sequence's block of that number; None if it is not full, or nothing is shared.

        The namespace is in a digest already; but a digest can be forged, and must not delay another tenant.
        """
        digest = self._cache.next_digest(sequence, index)
        return None if digest is None else (self._cache.namespace_of(sequence, index), digest)

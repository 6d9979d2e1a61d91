"""The sequences of one tenant that wait, in the order in which they are to start."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.policy import Policy, Rank
from radixserve.core.sequence import Sequence


class WaitingQueue:
    """Sequences that hold no blocks, new ones and preempted ones, sorted by the policy's rank.

    A sequence's request must not start while it is in the queue, as that changes its rank.
    num_new: those whose request has not begun to run; preempted ones are not among them.
    """

    def __init__(self, policy: Policy, cache: KVCache) -> None:
        self._policy = policy
        self._cache = cache
        self._sequences: list[Sequence] = []
        self._found: dict[Sequence, Match] = {}
        self.num_new = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first_rank(self) -> Rank:
        """The rank of the sequence in front. There must be one."""
        return self._policy.rank(self._sequences[0])

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its rank says."""
        insort(self._sequences, sequence, key=self._policy.rank)
        self.num_new += not sequence.request.has_started

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, which must be in the queue."""
        del self._sequences[self._index(self._policy.rank(sequence))]
        self._found.pop(sequence, None)
        self.num_new -= not sequence.request.has_started

    def has_one_before(self, sequence: Sequence) -> bool:
        """Whether someone waits who goes before a running sequence."""
        return bool(self._sequences) and self._policy.rank(self._sequences[0]) < self._policy.rank(sequence)

    def num_new_ahead(self, sequence: Sequence) -> int:
        """How many requests of the same priority came before a new one and have not run yet. 0 for one that has run."""
        rank = self._policy.rank(sequence)
        first = self._index(Rank(rank.priority, is_new=True, arrival=0, choice_index=0))
        return max(self._index(rank) - first, 0)

    def rounds(self) -> Iterator[Iterable[tuple[Sequence, Match]]]:
        """Yield the rounds in turn, each member with what the cache has of it, in the order in which they are to start.

        The next round comes only after the caller has removed every member of the one before. So at most one round is
        looked up in the cache in vain, however many wait. Members may be removed meanwhile, and none added.
        """
        while self._sequences:
            current = self._policy.rank(self._sequences[0]).round
            end = bisect_left(self._sequences, True, key=lambda sequence: self._policy.rank(sequence).round != current)
            members = self._sequences[:end]
            found = ((sequence, self._match(sequence)) for sequence in members)
            # Only whole blocks count: the few tokens that all chat prompts begin with are no reason to overtake.
            yield sorted(found, key=_num_missed_blocks) if self._policy.prefers_hits and current.is_new else found
            if self._sequences and self._policy.rank(self._sequences[0]).round == current:
                return

    def _match(self, sequence: Sequence) -> Match:
        """Look up a sequence in the cache, from where it was found last."""
        match = self._cache.match(sequence, self._found.get(sequence))
        self._found[sequence] = match
        return match

    def _index(self, rank: Rank) -> int:
        return bisect_left(self._sequences, rank, key=self._policy.rank)


def _num_missed_blocks(found: tuple[Sequence, Match]) -> int:
    return -len(found[1].block_ids)

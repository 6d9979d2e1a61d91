"""A small scheduler and executor over a shadow of the K/V, which remembers what each slot was computed from."""

import pickle
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

from radixserve.config import EvictionPolicy
from radixserve.core.batch import BlockCopy
from radixserve.core.kv_cache import KVCache, Match
from radixserve.core.sequence import Request, Sequence
from radixserve.sampling_params import SamplingParams

# What a slot holds: the namespace and all tokens up to and including its own. None: never written, or garbage.
Prefix = tuple[bytes, tuple[int, ...]]
MAX_CANDIDATES = 8


def make_sequence(token_ids: Iterable[int], namespace: bytes = b"") -> Sequence:
    tokens = array("i", token_ids)
    request = Request("", SamplingParams(), namespace, len(tokens), seed=0)
    return Sequence(request, choice_index=0, token_ids=tokens)


@dataclass
class Entry:
    """A node of the tree with all tokens and blocks of its path."""

    namespace: bytes
    depth: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_own_blocks: int
    is_tail: bool
    followers: list["Entry"] = field(default_factory=list)


class Driver:
    """Runs sequences on a KVCache, and checks its public figures. running: the sequences that may hold blocks."""

    def __init__(
        self, num_blocks: int, block_size: int, *, eviction_policy: EvictionPolicy = "learned-reuse", **options: Any
    ) -> None:
        self.cache = KVCache(num_blocks, block_size, eviction_policy=eviction_policy, **options)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.running: list[Sequence] = []
        self.shadow: dict[tuple[int, int], Prefix | None] = {}
        self.num_copies = 0
        self.sources: dict[Sequence, int] = {}

    # What a scheduler does.

    def start(self, token_ids: Iterable[int], namespace: bytes = b"", chunk: int | None = None) -> Sequence:
        """Compute a whole prompt, `chunk` tokens a step, and leave the sequence running."""
        sequence = make_sequence(token_ids, namespace)
        match = self.cache.match(sequence)
        num_tokens = min(sequence.num_tokens - match.num_tokens, chunk or sequence.num_tokens)
        assert self.admit(sequence, num_tokens, match)
        self.compute(sequence, min(num_tokens, sequence.num_uncomputed_tokens))
        while sequence.num_uncomputed_tokens:
            assert self.step(sequence, min(chunk or sequence.num_tokens, sequence.num_uncomputed_tokens))
        return sequence

    def admit(self, sequence: Sequence, num_tokens: int, match: Match | None = None) -> bool:
        """Allocate for a sequence without blocks. False has changed nothing."""
        match = match or self.cache.match(sequence)
        before = pickle.dumps(self.cache)
        if not self.cache.allocate(sequence, num_tokens, match):
            assert pickle.dumps(self.cache) == before
            assert not sequence.block_table
            return False
        assert sequence.num_computed_tokens <= match.num_tokens
        self.running.append(sequence)
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate for a running sequence. False has changed nothing."""
        before = pickle.dumps((self.cache, sequence))
        if not self.cache.allocate(sequence, num_tokens):
            assert pickle.dumps((self.cache, sequence)) == before
            return False
        return True

    def step(self, sequence: Sequence, num_tokens: int) -> bool:
        """One step of a running sequence alone. False if there is no room."""
        if not self.extend(sequence, num_tokens):
            return False
        self.compute(sequence, num_tokens)
        return True

    def generate(self, sequence: Sequence, token_ids: Iterable[int]) -> None:
        """Sample the given tokens one a step. The last one gets no K/V."""
        for index, token_id in enumerate(token_ids):
            if index:
                assert self.step(sequence, 1)
            sequence.token_ids.append(token_id)

    def compute(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """Run a batch of one row that has room already."""
        self.execute([(sequence, num_tokens or sequence.num_uncomputed_tokens)])
        self.end_step()

    def fork(self, parent: Sequence, token_ids: Iterable[int] = ()) -> Sequence:
        """Return a running child that shares the parent's K/V and goes on with other tokens."""
        child = make_sequence([*parent.token_ids[: parent.num_computed_tokens], *token_ids], parent.request.namespace)
        self.cache.fork(parent, child)
        self.running.append(child)
        return child

    def finish(self, sequence: Sequence) -> None:
        """End a running sequence, or preempt it."""
        self.cache.commit(sequence)
        self.cache.release(sequence)
        self.running.remove(sequence)
        self.sources.pop(sequence, None)
        assert not sequence.block_table
        assert sequence.num_computed_tokens == sequence.num_committed_blocks == 0

    def run(self, prompt: Tokens[int], generated: Tokens[int] = (), chunk: int | None = None, **options: Any) -> int:
        """Serve one request from start to end; return how many prompt tokens were cached."""
        num_cached = self.num_cached(prompt, **options)
        sequence = self.start(prompt, chunk=chunk, **options)
        self.generate(sequence, generated)
        self.finish(sequence)
        self.check()
        return num_cached

    def num_cached(self, prompt: Iterable[int], namespace: bytes = b"") -> int:
        """How many tokens of a prompt a request would find now. Checks the match."""
        return self.check_match(make_sequence(prompt, namespace)).num_tokens

    def evict(self, num_blocks: int) -> None:
        """Make a request of unseen tokens need num_blocks blocks beyond the free ones, and abort it."""
        size = (self.cache.stats().num_free_blocks + num_blocks) * self.block_size
        sequence = make_sequence([-1] * size)
        assert self.admit(sequence, size)
        self.cache.take_copies()
        self.end_step()
        self.cache.release(sequence)
        self.running.remove(sequence)

    # What an executor does.

    def execute(self, rows: list[tuple[Sequence, int]]) -> None:
        """Copy, then read and write K/V of each row, then advance and commit it."""
        copies = self.take_copies()
        contents = [self._block(copy.source) for copy in copies]
        for copy, content in zip(copies, contents, strict=True):
            for offset, prefix in enumerate(content):
                self.shadow[copy.destination, offset] = prefix
        self.check(self.sources.values())
        for sequence, num_tokens in rows:
            end = sequence.num_computed_tokens + num_tokens
            for position in range(sequence.num_computed_tokens, end):
                slot = divmod(position, self.block_size)
                self.shadow[sequence.block_table[slot[0]], slot[1]] = self._prefix(sequence, position)
        for sequence, num_tokens in rows:
            sequence.num_computed_tokens += num_tokens
            self.cache.commit(sequence)

    def take_copies(self) -> list[BlockCopy]:
        """Take the step's copies, and note in sources which sequence each is for."""
        copies = self.cache.take_copies()
        self.num_copies += len(copies)
        assert len({copy.destination for copy in copies}) == len(copies)
        for copy in copies:
            (writer,) = [sequence for sequence in self.running if copy.destination in sequence.block_table]
            self.sources[writer] = copy.source
        return copies

    def end_step(self) -> None:
        self.cache.end_step()
        self.sources.clear()

    # The laws.

    def check(self, sources: Iterable[int] = ()) -> None:
        """Everything that must hold between two steps, or, with the sources of its copies, before a step computes."""
        entries = self.entries()
        stats = self.cache.stats()
        held = {block_id for sequence in self.running for block_id in sequence.block_table}.union(sources)
        own_blocks = [block_id for entry in entries for block_id in entry.block_ids[-entry.num_own_blocks :]]
        findable = set(own_blocks)
        assert len(own_blocks) == len(findable), "a block is in the tree twice"
        assert stats.num_in_use_blocks == len(held)
        assert stats.num_cached_blocks == len(findable - held)
        assert stats.num_free_blocks == self.num_blocks - len(held | findable)
        assert stats.num_free_blocks + stats.num_cached_blocks + stats.num_in_use_blocks == stats.num_blocks
        assert stats.num_tree_nodes == len(entries)
        assert stats.tree_depth == max((entry.depth for entry in entries), default=0)
        for sequence in self.running:
            self.check_reads_its_own_prefix(sequence)
            self._check_blocks_are_its_own_to_write(sequence)
        for entry in entries:
            self.check_holds(entry.block_ids, entry.namespace, entry.token_ids)
            if not entry.is_tail:
                assert len(entry.followers) != 1 or entry.followers[0].is_tail, "a run without a branch is two nodes"

    def check_match(self, sequence: Sequence) -> Match:
        """A match is pure, names only blocks that hold the sequence's own prefix, and leaves a token to compute."""
        before = pickle.dumps(self.cache)
        match = self.cache.match(sequence)
        assert pickle.dumps(self.cache) == before
        assert 0 <= match.num_tokens <= max(sequence.num_tokens - 1, 0)
        num_full, num_inside = divmod(match.num_tokens, self.block_size)
        assert len(match.block_ids) == num_full
        assert (match.partial_block_id is None) == (num_inside == 0)
        partial = () if match.partial_block_id is None else (match.partial_block_id,)
        prefix = sequence.token_ids[: match.num_tokens]
        self.check_holds([*match.block_ids, *partial], sequence.request.namespace, prefix)
        return match

    def longest_common_prefix(self, sequence: Sequence) -> int:
        """What a match must find: the most leading tokens, all but one, that any path of the tree begins with."""
        wanted = sequence.token_ids[: sequence.num_tokens - 1]
        return max(
            (
                num_common(entry.token_ids, wanted)
                for entry in self.entries()
                if entry.namespace == sequence.request.namespace
            ),
            default=0,
        )

    def check_reads_its_own_prefix(self, sequence: Sequence) -> None:
        prefix = sequence.token_ids[: sequence.num_computed_tokens]
        self.check_holds(sequence.block_table, sequence.request.namespace, prefix)

    def check_holds(self, block_ids: Tokens[int], namespace: bytes, token_ids: Tokens[int]) -> None:
        for position in range(len(token_ids)):
            index, offset = divmod(position, self.block_size)
            assert self.shadow.get((block_ids[index], offset)) == (namespace, tuple(token_ids[: position + 1]))

    def entries(self) -> list[Entry]:
        """The nodes of the tree, each with its whole path."""
        entries: list[Entry] = []
        path: list[Entry] = []
        for run in self.cache.walk():
            del path[run.depth - 1 :]
            above = path[-1] if path else None
            assert len(path) == run.depth - 1
            assert run.num_tokens_above == (len(above.token_ids) if above else 0)
            assert above is None or (above.namespace == run.namespace and not above.is_tail)
            assert run.token_ids
            assert len(run.block_ids) == -(-len(run.token_ids) // self.block_size)
            is_tail = len(run.token_ids) % self.block_size != 0
            assert not is_tail or len(run.block_ids) == 1
            entry = Entry(
                run.namespace,
                run.depth,
                (*(above.token_ids if above else ()), *run.token_ids),
                (*(above.block_ids if above else ()), *run.block_ids),
                len(run.block_ids),
                is_tail,
            )
            if above is not None:
                above.followers.append(entry)
            path.append(entry)
            entries.append(entry)
        return entries

    def _check_blocks_are_its_own_to_write(self, sequence: Sequence) -> None:
        findable = {block_id for entry in self.entries() for block_id in entry.block_ids}
        assert findable.isdisjoint(sequence.block_table[sequence.num_computed_tokens // self.block_size :])

    def _block(self, block_id: int) -> list[Prefix | None]:
        return [self.shadow.get((block_id, offset)) for offset in range(self.block_size)]

    def _prefix(self, sequence: Sequence, position: int) -> Prefix:
        return sequence.request.namespace, tuple(sequence.token_ids[: position + 1])


def num_common(left: Tokens[int], right: Tokens[int]) -> int:
    """How many leading tokens are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))

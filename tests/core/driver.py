"""A small scheduler and executor over a shadow of the K/V, which remembers what each slot was computed from."""

import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

from radixserve.core.batch import BlockCopy
from radixserve.core.kv_cache import CacheSettings, KVCache, Match
from radixserve.core.namespace import is_public, public_namespace_of, tenant_of
from radixserve.core.public_prefixes import CachePath
from radixserve.core.sequence import Request, Sequence
from radixserve.sampling_params import SamplingParams
from tests.clock import FakeClock
from tests.core.pin_model import PinModel

# What a slot holds: the namespace of its block, and all tokens up to its own. None: never written, or garbage.
Prefix = tuple[bytes, tuple[int, ...]]
MAX_CANDIDATES = 8


def make_sequence(token_ids: Iterable[int], namespace: bytes = b"") -> Sequence:
    tokens = array("i", token_ids)
    request = Request("", SamplingParams(), namespace, len(tokens), seed=0)
    return Sequence(request, choice_index=0, token_ids=tokens)


@dataclass
class Entry:
    """A node of the tree with all tokens and blocks of its path, and the namespace of each of these blocks."""

    namespaces: tuple[bytes, ...]
    depth: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_own_blocks: int
    is_tail: bool
    followers: list["Entry"] = field(default_factory=list)

    @property
    def own_block_ids(self) -> tuple[int, ...]:
        """The blocks of this node alone."""
        return self.block_ids[-self.num_own_blocks :]


class Driver:
    """Runs sequences on a KVCache, and checks its public figures. running: the sequences that may hold blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        public_prefixes: Tokens[Tokens[int]] = (),
        clock: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        clock = clock or FakeClock()
        self.cache = KVCache(
            num_blocks, block_size, CacheSettings(public_prefixes=public_prefixes, clock=clock, **settings)
        )
        self.pins = PinModel(self.cache, self.path_of, clock)
        self.public_prefixes = public_prefixes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.running: list[Sequence] = []
        self.shadow: dict[tuple[int, int], Prefix | None] = {}
        self.num_copies = 0
        self.copies: dict[Sequence, BlockCopy] = {}
        self.num_queried_tokens: Counter[str | None] = Counter()
        self.num_hit_tokens: Counter[str | None] = Counter()
        self.num_evicted_tokens: Counter[str | None] = Counter()
        self.num_evicted_public_tokens = 0

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
        before, was_findable = pickle.dumps(self.cache), self.findable()
        if not self.cache.allocate(sequence, num_tokens, match):
            assert pickle.dumps(self.cache) == before
            assert not sequence.block_table
            return False
        assert sequence.num_computed_tokens <= match.num_tokens
        self.running.append(sequence)
        self._count_evicted(was_findable, sequence)
        self.cache.record_query(sequence.request.tenant, sequence.num_tokens, sequence.num_computed_tokens)
        self.num_queried_tokens[sequence.request.tenant] += sequence.num_tokens
        self.num_hit_tokens[sequence.request.tenant] += sequence.num_computed_tokens
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate for a running sequence. False has changed nothing."""
        before, was_findable = pickle.dumps((self.cache, sequence)), self.findable()
        if not self.cache.allocate(sequence, num_tokens):
            assert pickle.dumps((self.cache, sequence)) == before
            return False
        self._count_evicted(was_findable, None)
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
        tokens = array("i", [*parent.token_ids[: parent.num_computed_tokens], *token_ids])
        child = Sequence(parent.request, choice_index=1, token_ids=tokens)
        self.cache.fork(parent, child)
        self.running.append(child)
        return child

    def truncate(self, sequence: Sequence, num_tokens: int, token_ids: Iterable[int] = ()) -> None:
        """Give up a running sequence's K/V from num_tokens on, and let it go on with other tokens."""
        num_committed = min(sequence.num_committed_blocks, num_tokens // self.block_size)
        self.cache.truncate(sequence, num_tokens)
        del sequence.token_ids[num_tokens:]
        sequence.token_ids.extend(token_ids)
        assert sequence.num_computed_tokens == num_tokens
        assert sequence.num_committed_blocks == num_committed
        assert len(sequence.block_table) == -(-num_tokens // self.block_size)
        if sequence in self.copies and self.copies[sequence].destination not in sequence.block_table:
            del self.copies[sequence]

    def finish(self, sequence: Sequence) -> None:
        """End a running sequence, or preempt it."""
        self.cache.commit(sequence)
        self.cache.release(sequence)
        self.running.remove(sequence)
        self.copies.pop(sequence, None)
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
        self.check(copy.source for copy in self.copies.values())
        findable = self.findable()
        for sequence, num_tokens in rows:
            assert findable.keys().isdisjoint(sequence.block_table[sequence.num_computed_tokens // self.block_size :])
            end = sequence.num_computed_tokens + num_tokens
            for position in range(sequence.num_computed_tokens, end):
                slot = divmod(position, self.block_size)
                self.shadow[sequence.block_table[slot[0]], slot[1]] = self._prefix(sequence, position)
        for sequence, num_tokens in rows:
            sequence.num_computed_tokens += num_tokens
            self.cache.commit(sequence)
            self.pins.make(sequence)

    def take_copies(self) -> list[BlockCopy]:
        """Take the step's copies, and note which sequence each is for."""
        copies = self.cache.take_copies()
        self.num_copies += len(copies)
        assert len({copy.destination for copy in copies}) == len(copies)
        for copy in copies:
            (writer,) = [sequence for sequence in self.running if copy.destination in sequence.block_table]
            self.copies[writer] = copy
        return copies

    def end_step(self) -> None:
        self.cache.end_step()
        self.copies.clear()

    # The laws.

    def check(self, sources: Iterable[int] = ()) -> None:
        """Everything that must hold between two steps, or, with the sources of its copies, before a step computes."""
        sources = list(sources)
        entries = self.entries()
        stats = self.cache.stats()
        held = {block_id for sequence in self.running for block_id in sequence.block_table}.union(sources)
        own_blocks = [block_id for entry in entries for block_id in entry.own_block_ids]
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
        for entry in entries:
            self.check_holds(entry.block_ids, entry.namespaces, entry.token_ids)
            if not entry.is_tail and len(entry.followers) == 1:
                (follower,) = entry.followers
                assert follower.is_tail or follower.namespaces[-1] != entry.namespaces[-1], (
                    "a run without a branch is two nodes"
                )
        assert stats.num_queried_tokens == self.num_queried_tokens.total()
        assert stats.num_hit_tokens == self.num_hit_tokens.total()
        assert stats.num_evicted_tokens == self.num_evicted_tokens.total() + self.num_evicted_public_tokens
        if not sources:
            self._check_tenants(held)

    def _check_tenants(self, held: set[int]) -> None:
        """Each tenant's figures are those of its own sequences and namespaces; public blocks are nobody's."""
        own_blocks = [(i, namespace) for i, (namespace, _) in self.findable().items() if not is_public(namespace)]
        for tenant in {None, *self.num_queried_tokens}:
            running = [sequence for sequence in self.running if sequence.request.tenant == tenant]
            stats = self.cache.tenant_stats(tenant, running, 7)
            own = {block_id for block_id, namespace in own_blocks if tenant_of(namespace) == tenant}
            assert stats.num_cached_blocks == len(own - held)
            assert stats.num_in_use_blocks == len({i for sequence in running for i in sequence.block_table})
            assert (stats.num_running, stats.num_waiting) == (len(running), 7)
            assert stats.num_queried_tokens == self.num_queried_tokens[tenant]
            assert stats.num_hit_tokens == self.num_hit_tokens[tenant]
            assert stats.num_evicted_tokens == self.num_evicted_tokens[tenant]

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
        self.check_holds([*match.block_ids, *partial], self.namespaces_of(sequence), prefix)
        return match

    def path_of(self, sequence: Sequence) -> CachePath:
        """The path that a sequence's blocks must take."""
        own = sequence.request.namespace
        public = public_namespace_of(own)
        prompt = sequence.token_ids[: sequence.request.num_prompt_tokens].tolist()
        begins_with = [prefix for prefix in self.public_prefixes if prompt[: len(prefix)] == list(prefix)]
        if public is None or not begins_with:
            return CachePath(own)
        return CachePath(own, public, max(map(len, begins_with)) // self.block_size)

    def namespaces_of(self, sequence: Sequence) -> list[bytes]:
        """The namespace of each block that holds tokens of a sequence."""
        path = self.path_of(sequence)
        return [path.namespace_of(index) for index in range(-(-sequence.num_tokens // self.block_size))]

    def longest_common_prefix(self, sequence: Sequence) -> int:
        """What a match must find: the most leading tokens, all but one, in blocks of the sequence's own namespaces."""
        wanted, namespaces = sequence.token_ids[: sequence.num_tokens - 1], self.namespaces_of(sequence)
        return max(
            (
                min(num_common(entry.token_ids, wanted), num_common(entry.namespaces, namespaces) * self.block_size)
                for entry in self.entries()
            ),
            default=0,
        )

    def check_reads_its_own_prefix(self, sequence: Sequence) -> None:
        prefix = sequence.token_ids[: sequence.num_computed_tokens]
        self.check_holds(sequence.block_table, self.namespaces_of(sequence), prefix)

    def check_holds(self, block_ids: Tokens[int], namespaces: Tokens[bytes], token_ids: Tokens[int]) -> None:
        for position in range(len(token_ids)):
            index, offset = divmod(position, self.block_size)
            expected = namespaces[index], tuple(token_ids[: position + 1])
            assert self.shadow.get((block_ids[index], offset)) == expected

    def entries(self) -> list[Entry]:
        """The nodes of the tree, each with its whole path."""
        entries: list[Entry] = []
        path: list[Entry] = []
        for run in self.cache.walk():
            del path[run.depth - 1 :]
            above = path[-1] if path else None
            assert len(path) == run.depth - 1
            assert run.num_tokens_above == (len(above.token_ids) if above else 0)
            assert above is None or not above.is_tail
            assert run.token_ids
            assert len(run.block_ids) == -(-len(run.token_ids) // self.block_size)
            is_tail = len(run.token_ids) % self.block_size != 0
            assert not is_tail or len(run.block_ids) == 1
            entry = Entry(
                (*(above.namespaces if above else ()), *[run.namespace] * len(run.block_ids)),
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

    def findable(self) -> dict[int, Prefix]:
        """What each block of the tree holds: all tokens up to its last one."""
        findable: dict[int, Prefix] = {}
        for entry in self.entries():
            for index in range(len(entry.block_ids) - entry.num_own_blocks, len(entry.block_ids)):
                prefix = entry.token_ids[: (index + 1) * self.block_size]
                findable[entry.block_ids[index]] = (entry.namespaces[-1], prefix)
        return findable

    def _count_evicted(self, was_findable: dict[int, Prefix], attached: Sequence | None) -> None:
        """Count the tokens that an allocate made room of. A tail that the attached sequence took over is none of it."""
        gone = was_findable.keys() - self.findable().keys()
        if attached is not None and attached.num_computed_tokens % self.block_size:
            taken = attached.block_table[attached.num_computed_tokens // self.block_size]
            prefix = self._prefix(attached, attached.num_computed_tokens - 1)
            gone -= {taken} if was_findable.get(taken) == prefix else set()
        for block_id in gone:
            namespace, prefix_tokens = was_findable[block_id]
            num_tokens = (len(prefix_tokens) - 1) % self.block_size + 1
            if is_public(namespace):
                self.num_evicted_public_tokens += num_tokens
            else:
                self.num_evicted_tokens[tenant_of(namespace)] += num_tokens

    def _block(self, block_id: int) -> list[Prefix | None]:
        return [self.shadow.get((block_id, offset)) for offset in range(self.block_size)]

    def _prefix(self, sequence: Sequence, position: int) -> Prefix:
        namespace = self.path_of(sequence).namespace_of(position // self.block_size)
        return namespace, tuple(sequence.token_ids[: position + 1])


def num_common(left: Tokens[Any], right: Tokens[Any]) -> int:
    """How many leading elements are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))

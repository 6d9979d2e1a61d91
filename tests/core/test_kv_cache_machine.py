"""Random programs on the K/V cache, checked after each step against a shadow of the K/V."""

from collections.abc import Callable
from itertools import count
from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixserve.config import EvictionPolicy
from radixserve.core.kv_cache import Answer, Match
from radixserve.core.namespace import encode_namespace, is_public, tenant_of
from radixserve.core.radix_tree import xxh3_digest
from radixserve.core.sequence import Sequence
from tests.clock import FakeClock
from tests.core.driver import Driver, Entry, make_sequence


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return bytes(16)


def one_bit_digest(parent: bytes, content: bytes) -> bytes:
    return bytes([(sum(parent) + sum(content)) % 2]) * 16


# Two tokens only, so that prefixes collide, and no node has more entries than a lookup compares. A prompt goes on from
# some point of an earlier one, as an agent's next turn does: (which one, how much of it, what comes then).
prompts = st.tuples(st.integers(0, 99), st.integers(0, 20), st.lists(st.integers(0, 1), min_size=1, max_size=5))
Prompt = tuple[int, int, list[int]]
TENANTS = [None, "a", "b"]
SALTED = [encode_namespace(tenant="a", salt="b"), encode_namespace(salt="s")]
namespaces = st.sampled_from([b"", b"", b"", *(encode_namespace(tenant=tenant) for tenant in ("a", "a", "b")), *SALTED])
# Cut to whole blocks. Prompts go on from these as from earlier ones.
public_prefixes = st.just([]) | st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=3)
indices = st.integers(0, 99)
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
plans = st.lists(st.tuples(indices, st.integers(1, 17), st.integers(0, 1)), min_size=1, max_size=6)
Plan = list[tuple[int, int, int]]


class KVCacheMachine(RuleBasedStateMachine):
    """Sequences start, run in steps of several rows, fork, are truncated and preempted and end, under pressure."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Sequence] = []
        self.prompts: list[list[int]] = [[]]
        self.unseen = count(1000)
        self.last_held: dict[int, int] = {}
        self.first_matches: dict[Sequence, Match] = {}
        self.untold: list[Sequence] = []
        self.clock = count()
        self.seconds = FakeClock()

    @initialize(
        num_blocks=st.integers(1, 28),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        digest=st.sampled_from([xxh3_digest, xxh3_digest, constant_digest, one_bit_digest]),
        public=public_prefixes,
        eviction_policy=st.sampled_from(EVICTION_POLICIES),
        max_pinned_share=st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]),
    )
    def create(
        self,
        num_blocks: int,
        block_size: int,
        digest: Callable[[bytes, bytes], bytes],
        public: list[list[int]],
        eviction_policy: EvictionPolicy,
        max_pinned_share: float,
    ) -> None:
        whole = [prefix[: len(prefix) // block_size * block_size] for prefix in public]
        self.prompts += whole
        prefixes = list(filter(None, whole))
        self.driver = Driver(
            num_blocks,
            block_size,
            digest=digest,
            public_prefixes=prefixes,
            eviction_policy=eviction_policy,
            max_pinned_share=max_pinned_share,
            clock=self.seconds,
        )
        self.finds_all = digest is xxh3_digest
        self.is_lru = eviction_policy == "lru"

    @property
    def running(self) -> list[Sequence]:
        return self.driver.running

    @rule(namespace=namespaces, prompt=prompts)
    def start(self, namespace: bytes, prompt: Prompt) -> None:
        self.waiting.append(self.new_sequence(prompt, namespace))

    @rule(namespace=namespaces, prompt=prompts, chunk=st.integers(1, 17), ends=st.booleans())
    def serve(self, namespace: bytes, prompt: Prompt, chunk: int, ends: bool) -> None:
        """A request comes, and its prompt is computed as far as there is room."""
        sequence = self.new_sequence(prompt, namespace)
        self.waiting.append(sequence)
        while sequence.num_uncomputed_tokens and self.make_room(sequence, chunk, None):
            self.driver.execute([(sequence, min(chunk, sequence.num_uncomputed_tokens))])
            self.end_step()
        if sequence in self.running and ends:
            self.end(sequence)

    @precondition(lambda self: self.running or self.waiting)
    @rule(
        plan=plans,
        keeps_matches=st.booleans(),
        num_ended=st.sampled_from([0, 0, 0, 1, 2]),
        num_preempted=st.sampled_from([0, 0, 0, 1, 2]),
        num_cut=st.sampled_from([0, 0, 0, 1, 2]),
        cut=indices,
    )
    def step(self, plan: Plan, keeps_matches: bool, num_ended: int, num_preempted: int, num_cut: int, cut: int) -> None:
        """Several rows in one step. keeps_matches: all lookups come before all allocations, and so may be stale.

        num_ended: so many rows end within the step, before end_step. num_preempted: so many lose their room again,
        as a group of beams does when there is no room for the last of them. num_cut: so many are truncated when they
        have been computed, before end_step, as a refused draft demands; of the others in turn, one before the copies.
        """
        rows = self.schedule(plan, {s: self.check_match(s) for s in self.waiting} if keeps_matches else {})
        for sequence in list(rows)[len(rows) - num_preempted :] if num_preempted <= len(rows) else []:
            del rows[sequence]
            self.end(sequence)
            self.waiting.append(sequence)
        for sequence in list(rows)[:1] if num_cut == 2 else []:
            del rows[sequence]
            self.cut(sequence, cut, [])
        self.driver.execute(list(rows.items()))
        for sequence in list(rows)[len(rows) - num_cut :] if num_cut <= len(rows) else []:
            self.cut(sequence, cut, [])
        for sequence in list(rows)[:num_ended]:
            self.end(sequence)
        self.end_step()

    @precondition(lambda self: self.running or self.waiting)
    @rule(plan=plans, are_copies_taken=st.booleans())
    def fail_a_step(self, plan: Plan, are_copies_taken: bool) -> None:
        """Rows get room, but nothing is copied or computed: the step raised. All of them end."""
        rows = self.schedule(plan, {})
        for copy in self.driver.take_copies() if are_copies_taken else []:
            for offset in range(self.driver.block_size):
                self.driver.shadow[copy.destination, offset] = None
        for sequence in rows:
            self.end(sequence)
        assert not self.driver.cache.take_copies()
        self.end_step()
        if not are_copies_taken:
            # Nobody said which blocks were held as sources.
            self.last_held = dict.fromkeys(range(self.driver.num_blocks), next(self.clock))

    @precondition(lambda self: self.running)
    @rule(index=indices, token_ids=st.lists(st.integers(0, 1), max_size=3))
    def fork(self, index: int, token_ids: list[int]) -> None:
        in_use = self.driver.cache.stats().num_in_use_blocks
        parent = self.running[index % len(self.running)]
        # Of one request, so with all of its prompt where that matters.
        num_kept = parent.request.num_prompt_tokens if self.must_keep_prompt(parent) else 0
        self.driver.fork(parent, [*parent.token_ids[parent.num_computed_tokens : num_kept], *token_ids])
        assert self.driver.cache.stats().num_in_use_blocks <= in_use

    @precondition(lambda self: self.running)
    @rule(index=indices, cut=indices, token_ids=st.lists(st.integers(0, 1), max_size=3))
    def truncate(self, index: int, cut: int, token_ids: list[int]) -> None:
        sequence = self.running[index % len(self.running)]
        in_use = self.driver.cache.stats().num_in_use_blocks
        self.cut(sequence, cut, token_ids)
        assert self.driver.cache.stats().num_in_use_blocks <= in_use

    @precondition(lambda self: self.running)
    @rule(index=indices, is_preempted=st.booleans())
    def finish(self, index: int, is_preempted: bool) -> None:
        sequence = self.running[index % len(self.running)]
        num_computed = sequence.num_computed_tokens
        num_full = num_computed // self.driver.block_size
        is_shared = any(
            other is not sequence and not set(other.block_table).isdisjoint(sequence.block_table[num_full:])
            for other in self.running
        )
        self.end(sequence)
        if self.finds_all and not is_shared:
            again = make_sequence([*sequence.token_ids[:num_computed], 0], sequence.request.namespace)
            # Where an answer made the prompt begin with a public prefix, its blocks stay the tenant's own.
            if self.driver.path_of(again) == self.driver.path_of(sequence):
                assert self.driver.check_match(again).num_tokens == num_computed
        if is_preempted:
            self.waiting.append(sequence)

    @precondition(lambda self: self.untold)
    @rule(index=indices, calls_tool=st.sampled_from([True, False, None]), num_tokens=st.integers(0, 2000))
    def tell_how_an_answer_ended(self, index: int, calls_tool: bool | None, num_tokens: int) -> None:
        """Of a sequence that has started, be it running, waiting again or long gone."""
        sequence = self.untold.pop(index % len(self.untold))
        self.driver.cache.record_answer(sequence, Answer(calls_tool, num_tokens))

    @rule(num_tokens=st.integers(1, 12))
    def put_under_pressure(self, num_tokens: int) -> None:
        self.press(num_tokens)

    def press(self, num_tokens: int) -> None:
        """A request of tokens never seen before comes and is aborted: the longest unheld blocks make room for it."""
        cache = self.driver.cache
        held = {block_id for sequence in self.running for block_id in sequence.block_table}
        pinned = self.driver.pins.pinned_blocks()
        cached = {block_id for entry in self.driver.entries() for block_id in entry.block_ids} - held
        assert pinned <= cached | held
        cached -= pinned
        before = cache.stats()
        sequence = make_sequence([next(self.unseen) for _ in range(num_tokens)])
        num_needed = -(-num_tokens // self.driver.block_size)
        fits = self.driver.admit(sequence, num_tokens)
        assert fits == (num_needed <= before.num_free_blocks + len(cached))
        if fits:
            assert not cache.take_copies()
            evicted = cached.intersection(sequence.block_table)
            assert len(evicted) == max(num_needed - before.num_free_blocks, 0)
            kept = cached - evicted
            assert not self.is_lru or max(map(self.last_held.__getitem__, evicted), default=0) <= min(
                map(self.last_held.__getitem__, kept), default=10**9
            )
            cache.release(sequence)
            self.running.remove(sequence)

    @rule(
        namespace=namespaces,
        prompt=prompts,
        cut=indices,
        ttl=st.sampled_from([1.0, 5.0, 20.0]),
        serves=st.sampled_from([True, True, False]),
    )
    def pin(self, namespace: bytes, prompt: Prompt, cut: int, ttl: float, serves: bool) -> None:
        """A request comes that wants the first tokens of its prompt pinned, often all; serves: and it is served."""
        sequence = self.new_sequence(prompt, namespace)
        size = sequence.num_tokens
        if not self.driver.pins.want(sequence, size - (cut % size if cut % 2 else 0), ttl):
            return
        self.waiting.append(sequence)
        if serves:
            if self.make_room(sequence, size, None):
                self.driver.execute([(sequence, sequence.num_uncomputed_tokens)])
                self.end_step()
                self.end(sequence)
            self.waiting = [other for other in self.waiting if other is not sequence]

    @precondition(lambda self: self.driver.pins.expires_at)
    @rule(index=indices, tenant=st.sampled_from([None, *TENANTS]), num_tokens=st.integers(1, 12))
    def unpin(self, index: int, tenant: str | None, num_tokens: int) -> None:
        before = self.driver.pins.pinned_blocks()
        self.driver.pins.unpin(index, tenant)
        self.note_unpinned(before)
        self.press(num_tokens)

    @precondition(lambda self: self.driver.pins.expires_at)
    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 20.0]), num_tokens=st.integers(1, 40))
    def pass_time(self, seconds: float, num_tokens: int) -> None:
        self.seconds.seconds += seconds
        before = self.driver.pins.pinned_blocks()
        self.driver.pins.expire()
        self.note_unpinned(before)
        self.press(num_tokens)

    @precondition(lambda self: self.driver.pins.expires_at)
    @rule(num_tokens=st.integers(1, 60), index=indices, is_new=st.booleans())
    def break_pins(self, num_tokens: int, index: int, is_new: bool) -> None:
        """All sequences give way to one that is alone, which gets all blocks that there are, at the cost of pins."""
        driver, cache = self.driver, self.driver.cache
        alone = None if is_new or not self.running else self.running[index % len(self.running)]
        for other in [sequence for sequence in self.running if sequence is not alone]:
            self.end(other)
            self.waiting.append(other)
        before, num_broken = driver.pins.pinned_blocks(), cache.stats().num_broken_pins
        if alone is None:
            alone = make_sequence([next(self.unseen) for _ in range(num_tokens)])
            match = cache.match(alone)
            fits = driver.admit(alone, num_tokens, match) or (
                cache.break_pins(alone, num_tokens, match) and driver.admit(alone, num_tokens, match)
            )
        else:
            fits = driver.extend(alone, num_tokens) or (
                cache.break_pins(alone, num_tokens) and driver.extend(alone, num_tokens)
            )
        num_wanted = -(-(alone.num_computed_tokens + num_tokens) // driver.block_size)
        assert fits or num_wanted >= driver.num_blocks
        assert driver.pins.take_in_broken() == cache.stats().num_broken_pins - num_broken
        self.note_unpinned(before)
        if fits:
            self.fail(alone)

    @precondition(lambda self: len(self.prompts) > 8)
    @rule(tenant=st.sampled_from(TENANTS))
    def reset(self, tenant: str | None) -> None:
        """The cache of a tenant is dropped, or that of all for None."""
        cache, driver = self.driver.cache, self.driver
        before = driver.findable()
        concerned = {i for i, (namespace, _) in before.items() if tenant in (None, tenant_of(namespace))}
        held = {block_id for sequence in self.running for block_id in sequence.block_table}
        pinned = driver.pins.pinned_blocks()
        assert cache.reset(tenant) == (len(concerned - held), len(concerned & held))
        driver.pins.reset(tenant)
        self.note_unpinned(pinned)
        assert driver.findable() == {i: prefix for i, prefix in before.items() if i in held or i not in concerned}

    @rule(namespace=namespaces, prompt=prompts)
    def look_up(self, namespace: bytes, prompt: Prompt) -> None:
        self.check_match(self.new_sequence(prompt, namespace))

    @invariant()
    def holds(self) -> None:
        self.driver.check()
        self.driver.pins.forget_all_but({sequence.request for sequence in [*self.running, *self.waiting]})
        running = {sequence.request for sequence in self.running}
        self.driver.pins.check(running, self.driver.findable().keys(), finds_all=self.finds_all)
        if self.finds_all:
            size = self.driver.block_size
            for sequence in self.running:
                assert sequence.num_committed_blocks == sequence.num_computed_tokens // size
            for entry in self.driver.entries():
                if not entry.followers:
                    self.check_is_found(entry)

    @invariant()
    def an_earlier_match_changes_nothing_but_the_cost_of_a_later_one(self) -> None:
        for sequence in self.waiting:
            match = self.driver.cache.match(sequence)
            first = self.first_matches.setdefault(sequence, match)
            assert self.driver.cache.match(sequence, first) == match

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.running:
            self.driver.finish(self.running[-1])
            self.driver.check()
        self.driver.cache.reset()
        assert self.driver.cache.stats().num_free_blocks == self.driver.num_blocks
        assert not self.driver.entries()

    def check_match(self, sequence: Sequence) -> Match:
        match = self.driver.check_match(sequence)
        longest = self.driver.longest_common_prefix(sequence)
        assert match.num_tokens == longest if self.finds_all else match.num_tokens <= longest
        return match

    def check_is_found(self, entry: Entry) -> None:
        """A lookup of all that an entry holds finds its blocks, and knows which of them are held."""
        # Nobody has a public namespace for its own.
        own = b"" if is_public(entry.namespaces[-1]) else entry.namespaces[-1]
        sequence = make_sequence([*entry.token_ids, 2], own)
        if self.driver.namespaces_of(sequence)[: len(entry.namespaces)] != list(entry.namespaces):
            return  # part of a longer public prefix, or of a prompt that ended before the public one that it continues
        match = self.driver.cache.match(sequence)
        assert match.num_tokens == len(entry.token_ids)
        assert tuple(match.block_ids) == entry.block_ids[: len(entry.token_ids) // self.driver.block_size]
        held = {block_id for sequence in self.running for block_id in sequence.block_table}
        held |= self.driver.pins.pinned_blocks()
        assert self.driver.cache.num_held_blocks(match) == len(held.intersection(match.block_ids))

    def new_sequence(self, prompt: Prompt, namespace: bytes) -> Sequence:
        index, num_shared, rest = prompt
        self.prompts.append([*self.prompts[-1 - index % len(self.prompts)][:num_shared], *rest])
        return make_sequence(self.prompts[-1], namespace)

    def schedule(self, plan: Plan, matches: dict[Sequence, Match]) -> dict[Sequence, int]:
        """Allocate for the rows of a step. A sequence with nothing left to compute samples a token first."""
        rows: dict[Sequence, int] = {}
        for index, num_tokens, token_id in plan:
            sequences = [sequence for sequence in [*self.running, *self.waiting] if sequence not in rows]
            if not sequences:
                break
            sequence = sequences[index % len(sequences)]
            if not sequence.num_uncomputed_tokens:
                sequence.token_ids.append(token_id)
            if self.make_room(sequence, num_tokens, matches.get(sequence)):
                rows[sequence] = min(num_tokens, sequence.num_uncomputed_tokens)
        return rows

    def make_room(self, sequence: Sequence, num_tokens: int, match: Match | None) -> bool:
        if sequence in self.running:
            fits = self.driver.extend(sequence, num_tokens)
        else:
            fits = self.driver.admit(sequence, num_tokens, match)
            if fits:
                self.waiting.remove(sequence)
                self.untold.append(sequence)
        self.note_held()
        return fits

    def cut(self, sequence: Sequence, cut: int, token_ids: list[int]) -> None:
        """Truncate to some number of tokens, often by only a few, and go on with other ones."""
        self.note_held()
        self.prompts.append(sequence.token_ids.tolist())
        num_computed = sequence.num_computed_tokens
        # A draft is no part of the prompt, and what is not computed goes, too.
        num_drafts = num_computed - sequence.request.num_prompt_tokens
        if self.must_keep_prompt(sequence) and num_drafts < 0:
            return
        most = num_drafts if self.must_keep_prompt(sequence) else num_computed
        num_given_up = cut % (most + 1) if cut % 3 == 0 else min(cut % 5, most)
        self.driver.truncate(sequence, num_computed - num_given_up, token_ids)
        self.first_matches.pop(sequence, None)
        self.note_held()

    def must_keep_prompt(self, sequence: Sequence) -> bool:
        """Whether something depends on a prompt being what it was: where its path is public, or a pin."""
        return bool(self.driver.public_prefixes) or sequence.request in self.driver.pins.users

    def end(self, sequence: Sequence) -> None:
        self.driver.cache.commit(sequence)
        self.note_held()
        self.prompts.append(sequence.token_ids.tolist())
        self.driver.finish(sequence)

    def end_step(self) -> None:
        self.note_held()
        self.driver.end_step()

    def fail(self, sequence: Sequence) -> None:
        """End a sequence that has room for its next tokens, which are not computed."""
        self.driver.take_copies()
        self.end(sequence)
        self.end_step()

    def note_unpinned(self, pinned: set[int]) -> None:
        """Let blocks that were pinned and are not any more be as if they were held until now."""
        now = next(self.clock)
        self.last_held.update(dict.fromkeys(pinned - self.driver.pins.pinned_blocks(), now))

    def note_held(self) -> None:
        """Remember when each block was last held, by a sequence or as the source of a copy."""
        now = next(self.clock)
        self.last_held.update(dict.fromkeys((copy.source for copy in self.driver.copies.values()), now))
        for sequence in self.running:
            for block_id in sequence.block_table:
                self.last_held[block_id] = now


def run_machine(machine: type[KVCacheMachine], num_programs: int, num_steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_programs,
            stateful_step_count=num_steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


MACHINES = [KVCacheMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_random_programs_keep_the_laws_of_the_cache(machine: type[KVCacheMachine]) -> None:
    run_machine(machine, num_programs=200, num_steps=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
def test_many_long_random_programs_keep_the_laws_of_the_cache(machine: type[KVCacheMachine]) -> None:
    run_machine(machine, num_programs=400, num_steps=100)

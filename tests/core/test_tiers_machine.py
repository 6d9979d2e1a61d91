"""Random programs on a cache with a store below it."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixserve.core.sequence import Sequence, SequenceStatus
from tests.core.driver import make_sequence
from tests.core.test_kv_cache_machine import KVCacheMachine, Plan, indices, plans, run_machine
from tests.core.tiered_driver import SLOT_BYTES, TieredDriver

bits = st.integers(0, 1)


class TieredCacheMachine(KVCacheMachine):
    """What is evicted, or saved, goes to a store and comes back, be it into another cache; the store loses blocks."""

    driver_type = TieredDriver

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[bytes, list[int]]] = []

    @property
    def tiered(self) -> TieredDriver:
        assert isinstance(self.driver, TieredDriver)
        return self.driver

    @precondition(lambda self: self.waiting)
    @rule(index=indices, is_stuck=st.booleans())
    def read(self, index: int, is_stuck: bool) -> None:
        """A waiting sequence looks into the store."""
        self.tiered.store.is_stuck = is_stuck
        sequence = self.waiting[index % len(self.waiting)]
        assert sequence.status is SequenceStatus.WAITING
        match = self.driver.cache.match(sequence)
        self.tiered.tiers.awaits(sequence, match)
        assert self.driver.cache.match(sequence) == match

    @precondition(lambda self: self.waiting)
    @rule(index=indices)
    def load(self, index: int) -> None:
        self.load_all(self.waiting[index % len(self.waiting)])

    @rule(back=st.lists(st.tuples(indices, st.integers(0, 5), st.lists(bits, max_size=5)), min_size=1, max_size=4))
    def come_back(self, back: list[tuple[int, int, list[int]]]) -> None:
        """The pool is needed for others, and then requests go on from ended ones: (which one, but for, what then)."""
        for index, num_cut, rest in back:
            self.put_under_pressure(self.driver.cache.num_available_blocks * self.driver.block_size)
            self.run_step()
            namespace, token_ids = self.ended[index % len(self.ended)] if self.ended else (b"", [])
            prompt = [*token_ids[: max(len(token_ids) - num_cut, 0)], *rest, 0]
            sequence = make_sequence(prompt, namespace)
            self.waiting.append(sequence)
            self.load_all(sequence)
            if self.make_room(sequence, sequence.num_tokens, None):
                self.driver.execute([(sequence, sequence.num_uncomputed_tokens)])
                self.end_step()
                self.end(sequence)

    @rule()
    def run_step(self) -> None:
        """A step that computes nothing."""
        self.driver.execute([])
        self.end_step()

    @rule(index=indices, is_known=st.booleans())
    def lose(self, index: int, is_known: bool) -> None:
        """The store gives up a block, or finds it damaged when it is read."""
        store = self.tiered.store
        if store.blocks:
            name = list(store.blocks)[index % len(store.blocks)]
            if is_known:
                del store.blocks[name]
            else:
                store.lost.add(name)

    @rule(max_queued=st.sampled_from([0, 1, 3, 1000, 1000]))
    def fill_queue(self, max_queued: int) -> None:
        self.run_step()  # what waits to be copied out has room
        self.tiered.store.max_queued = max_queued

    @rule(begins=st.booleans())
    def save(self, begins: bool) -> None:
        self.tiered.tiers.save(begins=begins)

    @rule()
    def save_all(self) -> None:
        """When a save is done, all full blocks of the tree are in the store."""
        self.tiered.store.max_queued = 1000
        self.tiered.tiers.save(begins=True)
        while not self.tiered.tiers.save(begins=False).is_done:
            self.run_step()
        full = {prefix for prefix in self.driver.findable().values() if len(prefix[1]) % self.driver.block_size == 0}
        assert full <= set(self.tiered.stored())

    @precondition(lambda self: len(self.prompts) > 8)
    @rule()
    def restart(self) -> None:
        """All requests end, and another cache has the same store."""
        while self.running:
            self.driver.finish(self.running[-1])
        self.waiting.clear()
        self.untold.clear()
        self.first_matches.clear()
        self.last_held.clear()
        self.driver = self.tiered.restarted()

    @precondition(lambda self: self.running or self.waiting)
    @rule(plan=plans, are_copies_taken=st.booleans())
    def fail_a_step(self, plan: Plan, are_copies_taken: bool) -> None:
        super().fail_a_step(plan, are_copies_taken)
        self.tiered.fail()
        self.end_step()

    def load_all(self, sequence: Sequence) -> None:
        """Let a waiting sequence get what the store has of it, if nothing is in the way of that."""
        tiers, store, cache = self.tiered.tiers, self.tiered.store, self.driver.cache
        store.is_stuck = False
        sequence.load_wait = None
        while tiers.awaits(sequence, match := cache.match(sequence)):
            self.run_step()
        num_full = len(match.block_ids)
        is_missed = num_full < sequence.num_reusable_tokens // self.driver.block_size
        if is_missed and store.contains(cache.keys.name_of(sequence, num_full)):
            # There was no room for it, or it was found damaged.
            assert sequence.load_wait is not None
            assert sequence.load_wait.is_over

    def end(self, sequence: Sequence) -> None:
        self.ended.append((sequence.request.namespace, sequence.token_ids.tolist()))
        super().end(sequence)

    def note_held(self) -> None:
        """Loads have given back what they held before the rows of their step do."""
        now = next(self.clock)
        self.last_held.update(dict.fromkeys(self.tiered.take_held(), now))
        super().note_held()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefixes of a few blocks be read and loaded in several parts."""
    monkeypatch.setattr("radixserve.core.tiers.loading.MAX_READ_BYTES", 4 * SLOT_BYTES * 3)
    monkeypatch.setattr("radixserve.core.tiers.loading.MAX_LOADED_BYTES_BUSY", 2 * SLOT_BYTES * 2)


def test_random_programs_keep_the_laws_of_a_cache_with_a_store() -> None:
    before = TieredDriver.num_loaded
    run_machine(TieredCacheMachine, num_programs=80, num_steps=40)
    assert TieredDriver.num_loaded > before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_long_random_programs_keep_the_laws_of_a_cache_with_a_store() -> None:
    run_machine(TieredCacheMachine, num_programs=400, num_steps=100)

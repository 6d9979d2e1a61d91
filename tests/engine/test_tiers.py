"""An engine with a store below its cache: what was evicted comes back, and nothing else changes."""

import random
from array import array
from collections.abc import Callable

import pytest

from radixserve.core.namespace import encode_namespace
from radixserve.core.tiers import choice
from radixserve.protocol import ExplainPrompt, PinAt, PromptFacts, ResetCache, SaveCache, SaveProgress
from radixserve.tiers.chain import Chain
from tests.engine.harness import BLOCK_SIZE, Harness, MakeHarness, ids
from tests.fake_store import FakeStore
from tests.stub import SLOT_BYTES

MakeTiered = Callable[..., tuple[Harness, FakeStore]]


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Every look at the clock takes a tenth of a millisecond."""
        self.now += 1e-4
        return self.now


@pytest.fixture
def make_tiered(make_harness: MakeHarness) -> MakeTiered:
    def make(store: FakeStore | None = None, **options: object) -> tuple[Harness, FakeStore]:
        store = store or FakeStore(SLOT_BYTES * BLOCK_SIZE)
        options.setdefault("clock", FakeClock())
        return make_harness(store=store, **options), store

    return make


def flood(harness: Harness, num_prompts: int = 4, length: int = 200) -> None:
    """Let other prompts take the whole pool."""
    for number in range(num_prompts):
        harness.ask([250, number, *ids(number, length)])


def test_what_was_evicted_comes_back_to_the_last_whole_block(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    first = harness.ask(prompt)
    flood(harness)
    assert len(store.blocks) > 6
    again = harness.ask(prompt)
    assert again.num_cached_tokens == 96
    assert again.answers[0].token_ids == first.answers[0].token_ids


def test_explain_counts_what_a_tier_has(make_tiered: MakeTiered) -> None:
    harness, _ = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness)
    facts = harness.core.control(ExplainPrompt(array("i", prompt).tobytes(), b"", False))
    assert isinstance(facts, PromptFacts)
    assert facts.num_hit_tokens + facts.num_stored_tokens == harness.ask(prompt).num_cached_tokens == 96


@pytest.mark.parametrize("tenant", ["a", None])
def test_a_reset_drops_what_tiers_have_of_a_tenant_too(make_tiered: MakeTiered, tenant: str | None) -> None:
    harness, _ = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompts = {name: ids(ord(name), 100) for name in "ab"}
    for name, prompt in prompts.items():
        harness.ask(prompt, namespace=encode_namespace(tenant=name, salt="s"))
    flood(harness)
    harness.core.control(ResetCache(tenant))
    cached = {
        name: harness.ask(prompt, namespace=encode_namespace(tenant=name, salt="s")).num_cached_tokens
        for name, prompt in prompts.items()
    }
    assert cached == {"a": 0, "b": 0 if tenant is None else 96}


@pytest.mark.parametrize("tenant", ["a", None])
def test_a_reset_drops_what_is_on_its_way_into_the_pool(
    make_tiered: MakeTiered, monkeypatch: pytest.MonkeyPatch, tenant: str | None
) -> None:
    monkeypatch.setattr("radixserve.core.tiers.loading.MAX_LOADED_BYTES_BUSY", 2 * SLOT_BYTES * BLOCK_SIZE)
    harness, _ = make_tiered(num_blocks=24, max_num_batched_tokens=256)
    prompt, namespace = ids(3, 200), encode_namespace(tenant="a")
    harness.ask(prompt, namespace=namespace)
    flood(harness)
    harness.add(ids(9, 20), max_tokens=40)
    harness.step()
    waiting = harness.add(prompt, namespace=namespace)
    while harness.executor.batches[-1].loads is None:
        harness.step()
    harness.core.control(ResetCache(tenant))
    num_batches = len(harness.executor.batches)
    harness.run()
    assert harness.results[waiting].num_cached_tokens == 0
    assert all(batch.loads is None for batch in harness.executor.batches[num_batches:])


@pytest.mark.parametrize("tenant", ["a", None])
def test_what_is_being_read_at_a_reset_is_not_loaded_when_it_comes(
    make_tiered: MakeTiered, monkeypatch: pytest.MonkeyPatch, tenant: str | None
) -> None:
    harness, store = make_tiered(num_blocks=24, max_num_batched_tokens=256)
    prompt, namespace = ids(3, 200), encode_namespace(tenant="a")
    harness.ask(prompt, namespace=namespace)
    flood(harness)
    num_batches = len(harness.executor.batches)
    store.is_stuck = True
    found = dict(store.blocks)
    waiting = harness.add(prompt, namespace=namespace)
    harness.step()
    assert store.reads
    harness.core.control(ResetCache(tenant))
    # The read that had begun finds them, and no other.
    store.blocks, store.is_stuck = found, False
    monkeypatch.setattr(store, "contains", lambda name: False)
    harness.run()
    assert harness.results[waiting].num_cached_tokens == 0
    assert all(batch.loads is None for batch in harness.executor.batches[num_batches:])


def test_a_long_prefix_comes_back_in_parts(make_tiered: MakeTiered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixserve.core.tiers.loading.MAX_READ_BYTES", 3 * SLOT_BYTES * BLOCK_SIZE)
    harness, _ = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 200)
    harness.ask(prompt)
    flood(harness)
    assert harness.ask(prompt).num_cached_tokens == 192
    assert max(len(b.loads.block_ids) for b in harness.executor.batches if b.loads is not None) == 3


def test_beside_rows_a_step_loads_little(make_tiered: MakeTiered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixserve.core.tiers.loading.MAX_LOADED_BYTES_BUSY", 2 * SLOT_BYTES * BLOCK_SIZE)
    harness, store = make_tiered(num_blocks=24, max_num_batched_tokens=256)
    prompt = ids(3, 200)
    expected = harness.ask(prompt)
    flood(harness)
    harness.add(ids(9, 20), max_tokens=40)
    harness.step()
    num_read = store.num_read
    again = harness.ask(prompt)
    assert again.num_cached_tokens == 192
    assert again.answers[0].token_ids == expected.answers[0].token_ids
    assert store.num_read == num_read + 12
    loads = [batch for batch in harness.executor.batches if batch.loads is not None]
    assert [len(batch.loads.block_ids) for batch in loads if batch.loads is not None] == [2] * 6
    assert all(batch.rows for batch in loads)


def test_a_new_engine_over_the_same_store_finds_what_the_last_one_saved(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered()
    prompts = [ids(start, 90) for start in range(5)]
    for prompt in prompts:
        harness.ask(prompt)
    save(harness)
    after, _ = make_tiered(store)
    assert [after.ask(prompt).num_cached_tokens for prompt in prompts] == [80] * 5


def test_a_save_tells_how_far_it_is_and_writes_beginnings_first(
    make_tiered: MakeTiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixserve.core.tiers.tiers.MAX_SAVED_BYTES_IDLE", SLOT_BYTES * BLOCK_SIZE)
    harness, store = make_tiered()
    prompt = ids(0, 90)
    harness.ask(prompt)
    assert harness.core.control(SaveCache()) == SaveProgress(False, 0, 5)
    for number in range(1, 6):
        advance(harness)
        assert len(store.blocks) == number
        copy = FakeStore(store.block_bytes)
        copy.blocks = dict(store.blocks)
        restored, _ = make_tiered(copy)
        assert restored.ask(prompt).num_cached_tokens == 16 * number
    assert harness.core.control(SaveCache(begins=False)) == SaveProgress(True, 5, 0)


def test_a_save_is_of_what_is_cached_when_it_begins_whatever_became_of_the_one_before(make_tiered: MakeTiered) -> None:
    """Whoever began that one may have gone before it was done."""
    harness, store = make_tiered()
    harness.ask(ids(0, 90))
    harness.core.control(SaveCache())
    settle(harness)
    assert len(store.blocks) == 5
    harness.ask(ids(1, 90))
    harness.core.control(SaveCache())
    settle(harness)
    assert len(store.blocks) == 10


def test_a_save_whose_tier_goes_off_keeps_the_engine_no_longer_busy(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered()
    harness.ask(ids(0, 90))
    harness.core.control(SaveCache())
    store.is_on = False
    settle(harness)
    assert not store.blocks


def test_a_save_to_several_tiers_writes_no_more_than_the_largest_holds(make_harness: MakeHarness) -> None:
    stores = [FakeStore(SLOT_BYTES * BLOCK_SIZE, capacity=capacity) for capacity in (2, 3)]
    harness = make_harness(store=Chain(stores), clock=FakeClock())
    harness.ask(ids(0, 90))
    assert save(harness).is_done
    assert len(stores[1].blocks) == 3


def test_a_save_goes_no_faster_than_the_queue_of_the_store(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered()
    harness.ask(ids(0, 90))
    store.max_queued = 2
    assert save(harness) == SaveProgress(True, 5, 0)
    assert max(len(batch.spills) for batch in harness.executor.batches) == 2


def test_a_save_to_a_tier_that_is_off_says_so(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered()
    harness.ask(ids(0, 90))
    store.is_on = False
    progress = save(harness)
    assert progress.error is not None
    assert "off" in progress.error


def test_a_save_without_a_tier_says_how_to_get_one(make_harness: MakeHarness) -> None:
    progress = make_harness().core.control(SaveCache())
    assert isinstance(progress, SaveProgress)
    assert progress.error is not None
    assert "--kv-cache-dir" in progress.error


def test_while_a_read_hangs_others_advance_at_every_step(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    expected = harness.ask(prompt).answers[0].token_ids
    flood(harness)
    store.is_stuck = True
    waiting = harness.add(prompt)
    running = harness.add(ids(9, 20), max_tokens=20)
    for number in range(1, 21):
        harness.step()
        assert len(harness.results[running].answers[0].token_ids) == number
    assert not harness.results[waiting].answers[0].token_ids
    store.is_stuck = False
    assert harness.result_of(waiting).answers[0].token_ids == expected


def test_a_read_that_never_ends_is_waited_for_twice_as_long_as_computing_takes(make_tiered: MakeTiered) -> None:
    clock = FakeClock()
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256, clock=clock)
    prompt = ids(3, 100)
    expected = harness.ask(prompt).answers[0].token_ids
    flood(harness)
    store.is_stuck = True
    waiting = harness.add(prompt)
    harness.step()
    assert not harness.core.has_work
    assert 0 < (harness.core.seconds_until_wake() or 0) < 0.1
    clock.now += choice.UNMEASURED_PATIENCE
    assert harness.core.has_work
    while not harness.results[waiting].answers[0].finish_reason:
        clock.now += 0.01
        harness.step()
    assert harness.results[waiting].num_cached_tokens == 0
    assert harness.results[waiting].answers[0].token_ids == expected


def test_what_is_slower_to_read_than_to_compute_is_computed(make_tiered: MakeTiered) -> None:
    store = FakeStore(SLOT_BYTES * BLOCK_SIZE, seconds_per_block=1000.0)
    harness, _ = make_tiered(store, num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness)
    assert harness.ask(prompt).num_cached_tokens == 0
    assert store.num_read == 0


def test_what_had_no_room_while_its_request_waited_is_loaded_when_it_has(make_tiered: MakeTiered) -> None:
    harness, _ = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness)
    running = harness.add(ids(9, 200), max_tokens=30)
    harness.step()
    waiting = [harness.add([*prompt, number]) for number in range(2)]
    harness.run()
    assert harness.results[running].answers[0].finish_reason
    assert [harness.results[request].num_cached_tokens for request in waiting] == [96, 96]


def test_those_who_wait_for_long_have_their_blocks_read_all_the_same(make_tiered: MakeTiered) -> None:
    """However many they are, and however long they wait for their turn."""
    clock = FakeClock()
    harness, _ = make_tiered(num_blocks=64, max_num_batched_tokens=256, max_num_seqs=1, clock=clock)
    prompts = [ids(start, 100) for start in range(8)]
    for prompt in prompts:
        harness.ask(prompt)
    flood(harness, num_prompts=12)
    harness.add(ids(9, 20), max_tokens=20)
    harness.step()
    requests = [harness.add(prompt) for prompt in prompts]
    clock.now += 100.0
    assert [harness.result_of(request).num_cached_tokens for request in requests] == [96] * 8


def test_what_is_being_loaded_costs_no_pin(make_tiered: MakeTiered) -> None:
    """It takes room that a request who is about to be alone would find one step later."""
    harness, _ = make_tiered(num_blocks=32, max_num_batched_tokens=512, max_pinned_share=0.5)
    loaded, pinned = ids(3, 200), ids(5, 160)
    harness.ask(loaded)
    flood(harness, num_prompts=6)
    harness.ask(pinned, pins=[PinAt("p", 160, 3600.0)])
    requests = [harness.add(loaded), harness.add(ids(9, 300))]
    assert [harness.result_of(request).num_cached_tokens for request in requests] == [192, 0]
    assert harness.stats.cache.num_broken_pins == 0


def test_requests_that_share_a_prefix_share_its_read(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered(num_blocks=24, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness)
    num_read = store.num_read
    requests = [harness.add([*prompt, number]) for number in range(3)]
    assert [harness.result_of(request).num_cached_tokens for request in requests] == [96, 96, 96]
    assert store.num_read == num_read + 6


def test_an_aborted_request_leaves_nothing_of_its_read_behind(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness)
    store.is_stuck = True
    request = harness.add(prompt)
    harness.step()
    harness.core.abort([request])
    store.is_stuck = False
    harness.run()
    assert harness.ask(prompt).num_cached_tokens >= 96


def test_blocks_that_the_store_has_lost_are_computed(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    expected = harness.ask(prompt).answers[0].token_ids
    flood(harness)
    store.lost = set(list(store.blocks)[2:])
    again = harness.ask(prompt)
    assert again.num_cached_tokens < 96
    assert again.answers[0].token_ids == expected


def test_another_tenant_finds_nothing_in_the_store(make_tiered: MakeTiered) -> None:
    harness, _ = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    prompt = ids(3, 100)
    harness.ask(prompt, namespace=encode_namespace(tenant="a"))
    flood(harness)
    assert harness.ask(prompt, namespace=encode_namespace(tenant="b")).num_cached_tokens == 0
    assert harness.ask(prompt, namespace=encode_namespace(tenant="a")).num_cached_tokens == 96


def test_a_failed_step_gives_the_store_nothing_and_loads_nothing(make_tiered: MakeTiered) -> None:
    fails = False
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256, fail_on=lambda _: fails)
    prompt = ids(3, 100)
    expected = harness.ask(prompt).answers[0].token_ids
    flood(harness)
    before = set(store.blocks)
    fails = True
    harness.add(ids(77, 150))
    harness.add(prompt)
    while harness.core.has_work:
        harness.step()
    assert set(store.blocks) == before
    fails = False
    assert harness.ask(prompt).answers[0].token_ids == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["lru", "learned-reuse"])
def test_answers_are_those_without_a_tier(
    make_tiered: MakeTiered, make_harness: MakeHarness, seed: int, policy: str
) -> None:
    """In any mix of loads, lost blocks, slow reads, saves, aborts, preemption, several answers and beams."""
    rng = random.Random(seed)
    tiered, store = make_tiered(num_blocks=18, max_num_seqs=4, max_model_len=256, eviction_policy=policy)
    plain = make_harness(num_blocks=256, max_model_len=256)
    prompts = [ids(0, 40)]
    pairs: list[tuple[str, str]] = []
    for _ in range(60):
        prompt = [*rng.choice(prompts)[: rng.randrange(130)], *ids(rng.randrange(9), rng.randrange(1, 60))]
        prompts.append(prompt)
        kind = rng.random()
        if kind < 0.15:
            pair = tuple(h.add_beams(prompt, beam_width=2, max_tokens=6) for h in (tiered, plain))
        else:
            n = rng.choice([1, 1, 1, 2])
            pair = tuple(h.add(prompt, n=n, max_tokens=30) for h in (tiered, plain))
        if rng.random() < 0.1:
            tiered.step()
            tiered.core.abort([pair[0]])
        else:
            pairs.append((pair[0], pair[1]))
        store.is_stuck = rng.random() < 0.3
        store.max_queued = rng.choice([0, 2, 100])
        store.lost |= {name for name in store.blocks if rng.random() < 0.02}
        if rng.random() < 0.2:
            tiered.core.control(SaveCache())
        for _ in range(rng.randrange(6)):
            tiered.step()
    store.is_stuck = False
    tiered.run()
    plain.run()
    for ours, expected in pairs:
        answers, wanted = tiered.results[ours].answers, plain.results[expected].answers
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    assert tiered.stats.num_preemptions
    assert any(batch.loads is not None for batch in tiered.executor.batches)


def test_what_the_store_has_no_room_for_is_counted_and_computed_again(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered(num_blocks=16, max_num_batched_tokens=256)
    store.max_queued = 0
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness)
    assert harness.ask(prompt).num_cached_tokens == 0
    (tier,) = harness.stats.cache.tiers
    assert (tier.num_blocks, tier.num_dropped_blocks > 6) == (0, True)


def test_of_what_is_evicted_at_once_the_beginning_has_room_first(make_tiered: MakeTiered) -> None:
    """The rest would not be found without it."""
    harness, store = make_tiered(num_blocks=8, max_num_batched_tokens=256, max_model_len=128)
    store.max_queued = 3
    prompt = ids(3, 100)
    harness.ask(prompt)
    flood(harness, num_prompts=1, length=118)
    store.max_queued = 100
    assert harness.ask(prompt).num_cached_tokens == 48


def test_closing_the_engine_closes_the_store(make_tiered: MakeTiered) -> None:
    harness, store = make_tiered()
    harness.core.close()
    assert store.is_closed


def save(harness: Harness) -> SaveProgress:
    """Save the cache, and return how that ended."""
    progress = harness.core.control(SaveCache())
    while True:
        assert isinstance(progress, SaveProgress)
        if progress.is_done:
            return progress
        advance(harness)
        progress = harness.core.control(SaveCache(begins=False))


def advance(harness: Harness) -> None:
    """Run the next step, once it is time for it."""
    while not harness.core.has_work:
        assert harness.core.seconds_until_wake() is not None
    harness.step()


def settle(harness: Harness) -> None:
    """Run until the engine has nothing to do, and nothing to wait for."""
    for _ in range(100):
        if harness.core.seconds_until_wake() is None and not harness.core.has_work:
            return
        advance(harness)
    raise AssertionError("the engine goes on and on")

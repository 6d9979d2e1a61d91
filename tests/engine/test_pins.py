"""Pins through the whole engine on a stub model: what is promised to stay stays, as long as it was promised."""

import asyncio
from typing import get_args

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.namespace import encode_namespace
from radixserve.protocol import PinAt, Pins, ResetCache, ShowPins, ShowTenant, Unpin, Unpinned
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.clock import FakeClock
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids
from tests.stub import counting
from tests.stub_engine import stub_engine

EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
TENANT_A, TENANT_B = encode_namespace(tenant="a"), encode_namespace(tenant="b")
MINUTE = 60.0


def pin(pin_id: str, num_tokens: int, ttl: float = 5 * MINUTE) -> list[PinAt]:
    return [PinAt(pin_id, num_tokens, ttl)]


def flood(harness: Harness, seed: int) -> None:
    """Serve prompts that no other seed has, as many and as long as it takes to evict all that can be evicted."""
    num_available_blocks = harness.stats.cache.num_blocks - harness.stats.cache.num_pinned_blocks
    for index in range(3):
        harness.ask([100 + seed, 100 + index, *ids(0, num_available_blocks * B - 3)], max_tokens=1)


def show(harness: Harness, tenant: str | None = None) -> Pins:
    shown = harness.core.control(ShowPins(tenant))
    assert isinstance(shown, Pins)
    return shown


def shown_ids(harness: Harness, tenant: str | None = None) -> list[str]:
    return [shown.pin_id for shown in show(harness, tenant).pins]


def unpin(harness: Harness, pin_id: str, tenant: str | None = None) -> bool:
    reply = harness.core.control(Unpin(pin_id, tenant))
    assert isinstance(reply, Unpinned)
    return reply.is_found


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
@pytest.mark.parametrize("length", [2 * B, 2 * B + 1, 3 * B - 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 9, 40])
def test_a_pinned_prompt_hits_in_full_under_a_flood_until_its_time_is_over(
    make_harness: MakeHarness, eviction_policy: EvictionPolicy, length: int, max_tokens: int
) -> None:
    clock = FakeClock()
    harness = make_harness(num_blocks=24, eviction_policy=eviction_policy, clock=clock)
    prompt, other = ids(1, length), ids(3, length)
    harness.ask(prompt, pins=pin("p", length), max_tokens=max_tokens)
    harness.ask(other)
    flood(harness, 1)
    assert harness.ask(other, max_tokens=1).num_cached_tokens == 0
    assert harness.ask(prompt, max_tokens=1).num_cached_tokens == length - 1
    flood(harness, 2)
    clock.seconds += 5 * MINUTE - 0.01
    assert harness.ask(prompt, max_tokens=1).num_cached_tokens == length - 1
    clock.seconds += 0.02
    assert harness.core.has_work
    harness.step()
    assert harness.stats.cache.num_pinned_blocks == 0
    assert shown_ids(harness) == []
    flood(harness, 3)
    assert harness.ask(prompt, max_tokens=1).num_cached_tokens == 0


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_all_answers_of_a_request_leave_its_pinned_prompt_behind(
    make_harness: MakeHarness, eviction_policy: EvictionPolicy
) -> None:
    harness = make_harness(num_blocks=24, eviction_policy=eviction_policy, clock=FakeClock())
    prompt = ids(1, B + 5)
    harness.ask(prompt, pins=pin("p", B + 5), n=3, temperature=1.0, seed=1, max_tokens=20)
    flood(harness, 1)
    assert harness.ask(prompt).num_cached_tokens == B + 4


def test_a_pin_of_part_of_a_prompt_is_made_where_all_of_it_was_a_hit(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=24, clock=FakeClock())
    harness.ask(ids(1, 3 * B))
    assert harness.ask(ids(1, 3 * B), pins=pin("p", B + 3)).num_cached_tokens == 3 * B - 1
    flood(harness, 1)
    assert harness.ask(ids(1, 3 * B)).num_cached_tokens >= B + 3


def test_what_is_over_the_budget_is_refused_by_name_before_anything_is_computed(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=16, clock=FakeClock())
    harness.ask(ids(1, 2 * B), pins=pin("first", 2 * B), namespace=TENANT_A)
    harness.ask(ids(1, B), pins=pin("secret", B), namespace=TENANT_B)
    num_computed_tokens = harness.stats.num_computed_tokens
    refused = harness.add(ids(5, 2 * B), pins=pin("more", 2 * B), namespace=TENANT_A)
    harness.run()
    failure = harness.failures[refused]
    assert failure.kind == "pin_budget"
    assert "first (2 blocks, 300 s left); 1 block of others" in failure.message
    assert "secret" not in failure.message
    assert harness.stats.num_computed_tokens == num_computed_tokens
    harness.ask(ids(5, B), pins=pin("fits", B), namespace=TENANT_A)
    assert harness.stats.cache.num_pinned_blocks == show(harness).max_blocks == 4


def test_requests_that_come_together_with_one_prefix_need_the_room_of_one(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=16, clock=FakeClock())
    for index in range(6):
        harness.add([*ids(1, 3 * B), index], pins=pin(f"p{index}", 3 * B))
    harness.run()
    assert not harness.failures
    assert harness.stats.cache.num_pinned_blocks == 3


def test_a_request_that_is_aborted_gives_its_room_in_the_budget_back(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=16, max_num_batched_tokens=B, clock=FakeClock())
    request = harness.add(ids(1, 4 * B), pins=pin("p", 4 * B))
    harness.step()
    harness.core.abort([request])
    harness.ask(ids(5, 4 * B), pins=pin("q", 4 * B))
    assert shown_ids(harness) == ["q"]


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 400])
def test_a_request_that_cannot_run_alone_without_pinned_blocks_gets_them(
    make_harness: MakeHarness, eviction_policy: EvictionPolicy, max_num_batched_tokens: int
) -> None:
    harness = make_harness(
        num_blocks=12,
        max_model_len=12 * B,
        max_pinned_share=1.0,
        max_num_batched_tokens=max_num_batched_tokens,
        eviction_policy=eviction_policy,
        clock=FakeClock(),
    )
    harness.ask(ids(1, 6 * B), pins=pin("first", 6 * B, ttl=60.0))
    harness.ask(ids(5, 6 * B - 5), pins=pin("second", 6 * B - 5, ttl=90.0))
    assert harness.stats.cache.num_pinned_blocks == 12
    needs_half = harness.ask(ids(7, 5 * B), max_tokens=8)
    assert len(needs_half.answers[0].token_ids) == 8
    assert shown_ids(harness) == ["second"]
    grows = harness.ask(ids(9, 5 * B), max_tokens=6 * B, ignore_eos=True)
    assert len(grows.answers[0].token_ids) == 6 * B
    assert shown_ids(harness) == []
    assert harness.stats.cache.num_broken_pins == 2


def test_requests_wait_for_one_another_rather_than_break_a_pin(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=16, max_model_len=12 * B, clock=FakeClock())
    harness.ask(ids(1, 4 * B), pins=pin("p", 4 * B))
    requests = [harness.add(ids(start, 6 * B), max_tokens=4 * B, ignore_eos=True) for start in (3, 5, 7, 9)]
    harness.run()
    assert {len(harness.results[request].answers[0].token_ids) for request in requests} == {4 * B}
    assert harness.stats.cache.num_broken_pins == 0
    assert harness.ask(ids(1, 4 * B)).num_cached_tokens == 4 * B - 1


def test_a_beam_search_that_is_alone_gets_pinned_blocks(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=12, max_model_len=10 * B, max_pinned_share=1.0, clock=FakeClock())
    harness.ask(ids(1, 9 * B), pins=pin("p", 9 * B))
    harness.search(ids(5, B), beam_width=3, max_tokens=2 * B)
    assert harness.stats.cache.num_broken_pins == 1


def test_only_the_owner_and_the_operator_end_a_pin(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=64, clock=FakeClock())
    harness.ask(ids(1, B), pins=pin("a", B), namespace=TENANT_A)
    harness.ask(ids(1, B), pins=pin("b", B), namespace=TENANT_B)
    assert not unpin(harness, "a", "b")
    assert not unpin(harness, "nothing")
    assert (shown_ids(harness, "a"), shown_ids(harness, "b"), shown_ids(harness)) == (["a"], ["b"], ["a", "b"])
    assert unpin(harness, "a", "a")
    assert unpin(harness, "b")
    assert harness.stats.cache.num_pinned_blocks == 0


def test_a_tenant_sees_how_many_blocks_its_pins_keep_and_a_reset_ends_them(make_harness: MakeHarness) -> None:
    harness = make_harness(num_blocks=64, clock=FakeClock())
    harness.ask(ids(1, 2 * B), pins=pin("a", 2 * B), namespace=TENANT_A)
    harness.ask(ids(1, 3 * B), pins=pin("b", 3 * B), namespace=TENANT_B)
    num_pinned_blocks = [harness.core.control(ShowTenant(tenant)).num_pinned_blocks for tenant in ("a", "b", "c")]
    assert num_pinned_blocks == [2, 3, 0]
    harness.core.control(ResetCache("a"))
    assert shown_ids(harness) == ["b"]
    assert harness.stats.cache.num_pinned_blocks == 3


@pytest.mark.parametrize(
    ("pins", "options", "message"),
    [
        (pin("p", 0), {}, "the prompt has 32"),
        (pin("p", 2 * B + 1), {}, "the prompt has 32"),
        (pin("p", B, ttl=0.0), {}, "more than 0"),
        (pin("p", B, ttl=float("nan")), {}, "more than 0"),
        (pin("p", B, ttl=1e9), {}, "at most 30 days"),
        (pin("p", B), {"prefix_cache": False}, "--no-prefix-cache"),
    ],
)
def test_pins_that_cannot_be_are_refused(
    make_harness: MakeHarness, pins: list[PinAt], options: dict[str, bool], message: str
) -> None:
    harness = make_harness(**options)
    request = harness.add(ids(1, 2 * B), pins=pins)
    harness.run()
    assert harness.failures[request].kind == "invalid_request"
    assert message in harness.failures[request].message


def test_a_beam_search_that_wants_a_pin_is_refused(make_harness: MakeHarness) -> None:
    harness = make_harness()
    request = harness.add_beams(ids(1, B), pins=pin("p", B), beam_width=2)
    harness.run()
    assert "a beam search pins nothing" in harness.failures[request].message


@pytest.mark.anyio
async def test_an_idle_engine_wakes_up_when_a_pins_time_is_over(tokenizer: Tokenizer) -> None:
    """Told by figures that come without a request."""
    engine = stub_engine(tokenizer, counting(200))
    await engine.start()
    async for _ in engine.generate(ids(1, 2 * B), SamplingParams(max_tokens=1), pins=pin("p", 2 * B, ttl=0.2)):
        pass
    async with asyncio.timeout(20):
        while engine.stats is None or engine.stats.cache.num_pinned_blocks:
            await asyncio.sleep(0)
    await engine.close()

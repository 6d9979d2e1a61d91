"""Pins through the whole engine on a stub model: what is promised to stay stays, as long as it was promised."""

from typing import get_args

import pytest

from radixserve.config import EvictionPolicy
from radixserve.core.namespace import encode_namespace
from radixserve.protocol import PinAt, Pins, ShowPins, Unpin, Unpinned
from tests.clock import FakeClock
from tests.engine.harness import BLOCK_SIZE as B
from tests.engine.harness import Harness, MakeHarness, ids

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

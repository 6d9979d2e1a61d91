"""Prompts that are computed ahead, and kept for a time: /v1/cache/warm and /v1/cache/pin."""

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import CHAT, COMPLETIONS, alphabet, ask, called, error_of, refusal_of
from tests.clock import FakeClock
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

WARM = "/v1/cache/warm"
PIN = "/v1/cache/pin"
NUM_BLOCKS = 64
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "system", "content": "You are kind, and brief."}, {"role": "user", "content": "Hello there!"}]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def client(tokenizer: Tokenizer, clock: FakeClock) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(tool_call_parser="hermes", max_pinned_share=0.5)
    engine = stub_engine(tokenizer, alphabet, config=config, num_blocks=NUM_BLOCKS, max_model_len=900, clock=clock)
    async with called(engine) as client:
        yield client


async def num_cached(client: httpx.AsyncClient, route: str, **fields: Any) -> int:
    usage = (await ask(client, route, max_tokens=1, **fields))["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


async def num_pinned(client: httpx.AsyncClient) -> int:
    """Return how many blocks are kept, after a step, which sees what time it is."""
    await ask(client, COMPLETIONS, prompt="~", max_tokens=1)
    blocks = (await client.get("/v1/cache")).json()["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["in_use"] == blocks["total"]
    pinned: int = blocks["pinned"]
    return pinned


async def flood(client: httpx.AsyncClient) -> None:
    """Send prompts that take every block that can be had, several times over."""
    for letter in "abcdefgh":
        await ask(client, COMPLETIONS, prompt=letter * 400, max_tokens=1)


async def test_what_is_warmed_is_a_hit_and_nothing_is_generated(client: httpx.AsyncClient) -> None:
    prompt = "x" * 100
    assert await ask(client, WARM, prompt=prompt) == {
        "object": "cache.warm",
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "computed_tokens": 100,
    }
    again = await ask(client, WARM, prompt=prompt)
    assert (again["cached_tokens"], again["computed_tokens"]) == (99, 1)
    assert "radixserve_generated_tokens_total 0.0" in (await client.get("/metrics")).text
    assert await num_cached(client, COMPLETIONS, prompt=prompt) == 99


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"add_generation_prompt": False},
        {"cache_salt": "s"},
        {"model": "stub"},
    ],
)
async def test_what_is_warmed_is_the_prompt_of_a_chat_with_the_same_fields(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    warmed = await ask(client, WARM, messages=MESSAGES, **fields)
    usage = (await ask(client, CHAT, messages=MESSAGES, max_tokens=1, **fields))["usage"]
    assert usage["prompt_tokens"] == warmed["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == warmed["prompt_tokens"] - 1


async def test_token_ids_are_a_prompt(client: httpx.AsyncClient) -> None:
    assert (await ask(client, WARM, prompt=[120] * 50))["prompt_tokens"] == 50
    assert await num_cached(client, COMPLETIONS, prompt="x" * 50) == 49


async def test_a_pinned_prompt_hits_as_a_whole_after_a_flood_until_its_time_is_over(
    client: httpx.AsyncClient, clock: FakeClock
) -> None:
    before = time.time()
    pin = await ask(client, PIN, prompt="x" * 100, ttl=60)
    assert pin.keys() == {"id", "object", "tokens", "blocks", "expires_at", "ttl"}
    assert (pin["object"], pin["tokens"], pin["blocks"], pin["ttl"]) == ("cache.pin", 100, 7, 60)
    assert before + 59 <= pin["expires_at"] <= time.time() + 61
    assert await num_pinned(client) == 7
    await flood(client)
    assert await num_cached(client, COMPLETIONS, prompt="x" * 100) == 99
    clock.seconds += 61
    await flood(client)
    assert await num_pinned(client) == 0
    assert await num_cached(client, COMPLETIONS, prompt="x" * 100) == 0


async def test_several_pins_of_a_prompt_each_keep_it_for_their_own_time(
    client: httpx.AsyncClient, clock: FakeClock
) -> None:
    hour = await ask(client, PIN, prompt="x" * 100, ttl="1h")
    minutes = await ask(client, PIN, prompt="x" * 100, ttl="5m")
    assert hour["expires_at"] - minutes["expires_at"] == pytest.approx(3300, abs=2)
    assert (await client.delete(f"{PIN}/{hour['id']}")).status_code == 200
    assert await num_pinned(client) == 7
    assert (await client.delete(f"{PIN}/{minutes['id']}")).status_code == 200
    assert await num_pinned(client) == 0


async def test_an_unpinned_prompt_is_cached_as_any_other(client: httpx.AsyncClient) -> None:
    pin = await ask(client, PIN, messages=MESSAGES)
    assert pin["ttl"] == 300
    answer = await client.delete(f"{PIN}/{pin['id']}")
    assert (answer.status_code, answer.json()) == (200, {"id": pin["id"], "object": "cache.pin", "deleted": True})
    assert await num_pinned(client) == 0
    assert await num_cached(client, CHAT, messages=MESSAGES) == pin["tokens"] - 1
    await flood(client)
    assert await num_cached(client, CHAT, messages=MESSAGES) == 0
    gone = await client.delete(f"{PIN}/{pin['id']}")
    assert (gone.status_code, error_of(gone)["code"]) == (404, "pin_not_found")


@pytest.mark.parametrize("pin_id", ["x", "0" * 32, "a%20b", "%F0%9F%98%80", "x" * 1000])
async def test_a_pin_that_never_was_is_not_found(client: httpx.AsyncClient, pin_id: str) -> None:
    answer = await client.delete(f"{PIN}/{pin_id}")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "pin_not_found")


async def test_a_pin_whose_time_is_over_is_not_found(client: httpx.AsyncClient, clock: FakeClock) -> None:
    pin = await ask(client, PIN, prompt="x" * 20, ttl=1)
    clock.seconds += 1.5
    assert (await client.delete(f"{PIN}/{pin['id']}")).status_code == 404


async def test_to_pin_again_prolongs(client: httpx.AsyncClient, clock: FakeClock) -> None:
    first = await ask(client, PIN, prompt="x" * 100, ttl="1m")
    clock.seconds += 50
    second = await ask(client, PIN, prompt="x" * 100, ttl="1m")
    assert second["id"] != first["id"]
    assert await num_pinned(client) == 7
    clock.seconds += 50
    await flood(client)
    assert await num_cached(client, COMPLETIONS, prompt="x" * 100) == 99


async def test_a_short_pin_of_a_prompt_that_many_keep_for_longer_is_told(client: httpx.AsyncClient) -> None:
    for _ in range(70):
        await ask(client, PIN, prompt="x" * 100, ttl="1h")
    pin = await ask(client, PIN, prompt="x" * 100, ttl="1m")
    assert pin["ttl"] == 60
    assert (await client.delete(f"{PIN}/{pin['id']}")).status_code == 200


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(1, 1), (2.5, 2.5), (86400, 86400), ("5", 5), ("30s", 30), ("1.5h", 5400), ("24h", 86400), (None, 300)],
)
async def test_a_time_is_a_number_of_seconds_or_has_a_unit(client: httpx.AsyncClient, ttl: Any, seconds: float) -> None:
    assert (await ask(client, PIN, prompt="x", ttl=ttl))["ttl"] == seconds


@pytest.mark.parametrize(
    "ttl", [0, 0.9, -5, 86401, 1e308, "0s", "25h", "m", "5d", "1h30m", "", " 5m", "-5m", "\u0665m", "9" * 7 + "s"]
)
async def test_other_times_are_refused(client: httpx.AsyncClient, ttl: Any) -> None:
    assert (await refusal_of(client, PIN, prompt="x", ttl=ttl))["param"] == "ttl"
    assert await num_pinned(client) == 0


@pytest.mark.parametrize("ttl", [True, [], {}])
async def test_a_time_of_another_type_is_refused(client: httpx.AsyncClient, ttl: Any) -> None:
    assert (await refusal_of(client, PIN, prompt="x", ttl=ttl))["param"] == "ttl"


MARKED = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]


@pytest.mark.parametrize("route", [WARM, PIN])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10_000]}, "prompt"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"prompt": "a" * 900}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": MARKED}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 900}]}, "messages"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt": "a", "prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options"),
        ({"prompt": "a", "session_id": "s"}, "session_id"),
        ({"prompt": "a", "priority": 1}, "priority"),
    ],
)
async def test_what_is_no_prompt_is_refused_and_nothing_is_lost(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal_of(client, route, **fields))["param"] == param
    blocks = (await client.get("/v1/cache")).json()["blocks"]
    assert (blocks["free"], blocks["pinned"]) == (NUM_BLOCKS, 0)


async def test_more_than_the_share_is_refused_with_what_holds_it(client: httpx.AsyncClient) -> None:
    pin = await ask(client, PIN, prompt="x" * 400)
    answer = await client.post(PIN, json={"prompt": "y" * 400})
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (409, "pin_budget_exceeded")
    assert pin["id"] in error["message"]
    assert await num_pinned(client) == 25
    await client.delete(f"{PIN}/{pin['id']}")
    assert (await ask(client, PIN, prompt="y" * 400))["blocks"] == 25


@pytest.mark.parametrize("route", [WARM, PIN])
async def test_a_server_without_a_prefix_cache_keeps_nothing(tokenizer: Tokenizer, route: str) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=EngineConfig(no_prefix_cache=True))) as client:
        assert "--no-prefix-cache" in (await refusal_of(client, route, prompt="a"))["message"]


@pytest.mark.parametrize("route", [WARM, PIN])
async def test_an_engine_that_takes_no_requests_warms_and_pins_nothing(tokenizer: Tokenizer, route: str) -> None:
    engine = stub_engine(tokenizer, alphabet)
    async with called(engine) as client:
        engine.status = "restarting"
        for answer in (await client.post(route, json={"prompt": "a"}), await client.delete(f"{PIN}/x")):
            assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_unavailable")


async def test_a_tenant_cannot_end_or_see_the_pin_of_another(tokenizer: Tokenizer) -> None:
    keys = EngineConfig(api_key=("operator", "acme=first", "other=second"), max_pinned_share=0.5)

    def bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async with called(stub_engine(tokenizer, alphabet, config=keys)) as client:
        pin = (await client.post(PIN, json={"prompt": "x" * 400}, headers=bearer("first"))).json()
        denied = await client.delete(f"{PIN}/{pin['id']}", headers=bearer("second"))
        never = await client.delete(f"{PIN}/{'0' * 32}", headers=bearer("second"))
        assert (denied.status_code, error_of(denied)["code"]) == (404, "pin_not_found")
        assert error_of(denied)["message"].replace(pin["id"], "") == error_of(never)["message"].replace("0" * 32, "")
        full = await client.post(PIN, json={"prompt": "y" * 400}, headers=bearer("second"))
        assert full.status_code == 409
        assert pin["id"] not in full.text
        for key, pinned in (("first", 25), ("second", 0), ("operator", 25)):
            report = (await client.get("/v1/cache", headers=bearer(key))).json()
            assert report["blocks"]["pinned"] == pinned
        assert (await client.delete(f"{PIN}/{pin['id']}", headers=bearer("operator"))).status_code == 200

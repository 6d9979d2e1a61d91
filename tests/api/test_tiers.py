"""What the routes tell of tiers, and how the cache is saved to them."""

from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import alphabet, called, error_of
from tests.fake_store import FakeStore
from tests.stub import SLOT_BYTES
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

SAVE = "/v1/cache/save"
CONFIG = EngineConfig(kv_cache_dir="cache")


def new_store() -> FakeStore:
    return FakeStore(SLOT_BYTES * CONFIG.block_size)


async def complete(client: httpx.AsyncClient, prompt: str) -> Any:
    answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_save_answers_when_it_is_done_with_what_it_wrote(tokenizer: Tokenizer) -> None:
    store = new_store()
    async with called(stub_engine(tokenizer, alphabet, config=CONFIG, store=store)) as client:
        await complete(client, "x" * 70)
        assert (await client.post(SAVE)).json() == {"object": "cache.save", "saved_blocks": 4}
        assert (await client.post(SAVE, json={})).json() == {"object": "cache.save", "saved_blocks": 0}
        assert len(store.blocks) == 4


async def test_what_was_saved_is_there_after_a_restart(tokenizer: Tokenizer) -> None:
    store = new_store()
    async with called(stub_engine(tokenizer, alphabet, config=CONFIG, store=store)) as client:
        await complete(client, "x" * 70)
    assert store.is_closed
    assert len(store.blocks) == 4  # closing saves
    async with called(stub_engine(tokenizer, alphabet, config=CONFIG, store=store)) as client:
        usage = (await complete(client, "x" * 70))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 64


async def test_a_save_without_a_disk_is_a_400_that_names_the_flag(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet)) as client:
        refused = await client.post(SAVE)
    assert refused.status_code == 400
    assert "--kv-cache-dir" in error_of(refused)["message"]


async def test_a_save_to_a_disk_that_has_failed_is_a_500_that_says_so(tokenizer: Tokenizer) -> None:
    store = new_store()
    store.is_on = False
    async with called(stub_engine(tokenizer, alphabet, config=CONFIG, store=store)) as client:
        await complete(client, "x" * 70)
        failed = await client.post(SAVE)
    assert failed.status_code == 500
    assert "off" in error_of(failed)["message"]


async def test_a_tenant_saves_nothing_and_sees_no_tier(tokenizer: Tokenizer) -> None:
    config = EngineConfig(kv_cache_dir="cache", api_key=("acme=first",))
    engine = stub_engine(tokenizer, alphabet, config=config, store=new_store())
    async with called(engine, authorization="Bearer first") as client:
        refused = await client.post(SAVE)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "operator_only")
        assert (await client.get("/v1/cache")).json()["tiers"] == []


async def test_the_figures_of_a_tier_are_in_the_report_and_the_metrics(tokenizer: Tokenizer) -> None:
    async with called(stub_engine(tokenizer, alphabet, config=CONFIG, store=new_store())) as client:
        await complete(client, "x" * 70)
        await client.post(SAVE)
        (tier,) = (await client.get("/v1/cache")).json()["tiers"]
        assert (tier["name"], tier["is_on"], tier["blocks"], tier["written_blocks"]) == ("disk", True, 4, 4)
        assert tier["used_bytes"] == 4 * SLOT_BYTES * CONFIG.block_size
        metrics = (await client.get("/metrics")).text
        assert 'radixserve_tier_blocks{tier="disk"} 4.0' in metrics
        assert 'radixserve_tier_written_blocks_total{tier="disk"} 4.0' in metrics

"""Engines that publish what they have cached."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixserve.config import EngineConfig
from radixserve.core.block_store import OWNER_BYTES
from radixserve.core.kv_cache import CacheSettings, KVCache
from radixserve.engine.async_engine import AsyncEngine
from radixserve.engine.client import ProcessClient
from radixserve.engine.start import start_engine
from radixserve.errors import ConfigError
from radixserve.events.start import follow, open_publisher
from radixserve.protocol import ResetCache
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.core.driver import make_sequence
from tests.engine.harness import BLOCK_SIZE, Harness, ids
from tests.events.subscriber import Router, Subscriber, decode
from tests.fake_store import FakeStore
from tests.stub import SLOT_BYTES, counting
from tests.tiny_engine import write_tiny_engine


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tmp_path / "model"),
        num_kv_blocks=32,
        log_level="error",
        kv_events_endpoint=f"ipc://{tmp_path}/e",
        kv_events_replay_endpoint=f"ipc://{tmp_path}/r",
    )


def subscribe(config: EngineConfig) -> Subscriber:
    assert config.kv_events_endpoint is not None
    return Subscriber(config.kv_events_endpoint, config.kv_events_replay_endpoint)


@contextmanager
def following(tokenizer: Tokenizer, config: EngineConfig, **options: Any) -> Iterator[Harness]:
    """Yield an engine that publishes what it has cached."""
    caches: list[KVCache] = []

    def make_cache(num_blocks: int, block_size: int, settings: CacheSettings) -> KVCache:
        caches.append(KVCache(num_blocks, block_size, settings))
        return caches[0]

    harness = Harness(tokenizer, counting(200), num_blocks=12, cache_type=make_cache, **options)
    publisher = open_publisher(config)
    assert publisher is not None
    harness.core.publish_events(follow(caches[0], publisher, config, device="cuda:0"))
    try:
        yield harness
    finally:
        harness.core.close()


@pytest.fixture
def harness(tokenizer: Tokenizer, config: EngineConfig) -> Iterator[Harness]:
    with following(tokenizer, config) as harness:
        yield harness


def test_a_step_is_one_batch_at_most_and_told_when_it_ends(harness: Harness, config: EngineConfig) -> None:
    router = Router()
    num_read = 0
    with subscribe(config) as subscriber:
        for start in range(0, 60, 10):
            harness.add(ids(start, 70), max_tokens=20)
        while harness.core.has_work:
            harness.step()
            batches = subscriber.replay(num_read)
            assert len(batches) <= 1 + (num_read == 0)
            for number, payload in batches:
                assert number == num_read
                router.read(payload)
                num_read += 1
        harness.ask(ids(0, BLOCK_SIZE * 3))
        harness.core.control(ResetCache())
        harness.run()
        for _, payload in subscriber.replay(num_read):
            router.read(payload)
    assert router.num_cleared == 2
    assert not router.parents


@pytest.mark.parametrize("with_token_ids", [False, True])
def test_a_router_that_comes_late_knows_what_one_knows_that_was_there(
    with_token_ids: bool, tokenizer: Tokenizer, config: EngineConfig
) -> None:
    config = msgspec.structs.replace(config, kv_events_buffer=3, kv_events_token_ids=with_token_ids)
    first = Router()
    num_read = 0
    with following(tokenizer, config) as harness, subscribe(config) as subscriber:
        for start in range(0, 90, 10):
            harness.add(ids(start % 40, 70 + start % 30), max_tokens=20)
        while harness.core.has_work:
            harness.step()
            for number, payload in subscriber.replay(num_read):
                assert number == num_read
                first.read(payload)
                num_read += 1
            late = Router()
            for _, payload in subscriber.replay(0):
                late.read(payload)
            assert late.parents == first.parents
            assert late.token_ids == first.token_ids
    assert num_read > 20
    assert first.parents
    assert bool(first.token_ids) == with_token_ids


def test_what_comes_back_from_a_store_is_told_of_as_stored(tokenizer: Tokenizer, config: EngineConfig) -> None:
    store = FakeStore(SLOT_BYTES * BLOCK_SIZE)
    prompt = ids(3, 100)
    keys = KVCache(1, BLOCK_SIZE).keys
    names = {keys.name_of(make_sequence(prompt), index)[OWNER_BYTES:] for index in range(6)}
    with following(tokenizer, config, store=store, max_num_batched_tokens=256) as harness:
        known = []
        for flood in (False, True, False):
            for number in range(3 if flood else 1):
                result = harness.ask([250, number, *ids(0, 150)] if flood else prompt)
            router = Router()
            with subscribe(config) as subscriber:
                for _, payload in subscriber.replay(0):
                    router.read(payload)
            known.append(names <= router.parents.keys())
        assert result.num_cached_tokens == 96
    assert known == [True, False, True]


def test_what_an_engine_has_on_a_gpu_is_told_so(harness: Harness, config: EngineConfig) -> None:
    harness.ask(ids(0, 40))
    with subscribe(config) as subscriber:
        events = [event for _, payload in subscriber.replay(1) for event in decode(payload).events]
    assert events
    assert {getattr(event, "medium", None) for event in events} == {"GPU"}


@pytest.mark.anyio
async def test_an_engine_that_is_started_again_begins_anew(config: EngineConfig, tmp_path: Path) -> None:
    write_tiny_engine(tmp_path / "model")

    def make_client(config: EngineConfig) -> ProcessClient:
        clients.append(ProcessClient(config))
        return clients[-1]

    clients: list[ProcessClient] = []
    engine = AsyncEngine(config, make_client)
    await engine.start()
    try:
        with subscribe(config) as subscriber:
            router = Router()
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            async for _ in engine.generate(list(range(100)), params):
                pass
            for _, payload in await asyncio.to_thread(subscriber.replay, 0):
                router.read(payload)
            assert len(router.parents) == 6
            pid = clients[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while len(clients) == 1 or engine.status != "ready":
                await asyncio.sleep(0.01)
        with subscribe(config) as subscriber:
            batches = await asyncio.to_thread(subscriber.replay, 0)
            assert [number for number, _ in batches] == [0]
            router.read(batches[0][1])
            assert not router.parents
    finally:
        await engine.close()


def test_without_pyzmq_events_are_an_error_that_says_what_to_install(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'radixserve\[events\]'"):
        open_publisher(config)
    assert open_publisher(EngineConfig()) is None


def test_an_engine_that_does_not_start_leaves_no_address_in_use(config: EngineConfig, tmp_path: Path) -> None:
    write_tiny_engine(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"broken")
    with socket.create_server(("0.0.0.0", 0)) as free:
        endpoint = f"tcp://*:{free.getsockname()[1]}"
    for _ in range(2):
        with pytest.raises(ConfigError, match="safetensors"):
            start_engine(msgspec.structs.replace(config, kv_events_endpoint=endpoint), show_progress=False)

"""The engine process: spoken to over its socket, killed, started again, never left behind."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from radixserve.config import EngineConfig
from radixserve.engine.answer import GenerationResult
from radixserve.engine.async_engine import MAX_DEATHS, AsyncEngine
from radixserve.engine.client import ProcessClient
from radixserve.engine.in_process import in_process_engine
from radixserve.errors import ConfigError, EngineDied, EngineUnavailable, RequestFailed
from radixserve.protocol import ResetCache
from radixserve.sampling_params import SamplingParams
from tests.tiny_engine import write_tiny_engine

pytestmark = [pytest.mark.anyio]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_tiny_engine(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(model=str(model), num_kv_blocks=256, log_level="error")


class Clients:
    """Makes the process clients of an engine, and remembers the last one."""

    def __init__(self) -> None:
        self.last: ProcessClient

    def __call__(self, config: EngineConfig) -> ProcessClient:
        self.last = ProcessClient(config)
        return self.last

    def kill(self) -> None:
        assert self.last.pid is not None
        os.kill(self.last.pid, signal.SIGKILL)


async def collect(engine: AsyncEngine, params: SamplingParams) -> GenerationResult:
    result = GenerationResult.empty([1, 2, 3], params.n)
    async for delta in engine.generate([1, 2, 3], params):
        result.add(delta)
    return result


async def test_the_engine_process_answers_as_one_in_this_process(config: EngineConfig) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=20, logprobs=2, ignore_eos=True)
    results = []
    for engine in (AsyncEngine(config), in_process_engine(config)):
        await engine.start()
        results.append(await collect(engine, params))
        reply = await engine.control(ResetCache())
        assert reply.num_kept_blocks == 0
        await engine.close()
    assert results[0] == results[1]
    assert len(results[0].answers[1].token_ids) == 20


async def test_a_ctrl_c_of_the_group_does_not_end_an_engine_that_loads(config: EngineConfig) -> None:
    clients = Clients()
    engine = AsyncEngine(config, clients)
    loading = asyncio.create_task(engine.start())
    while not hasattr(clients, "last") or clients.last.pid is None:
        await asyncio.sleep(0)
    for stop in (signal.SIGINT, signal.SIGTERM):
        os.kill(clients.last.pid, stop)
    await loading
    assert engine.status == "ready"
    await engine.close()


async def test_a_killed_engine_ends_its_streams_and_comes_back(config: EngineConfig) -> None:
    clients = Clients()
    engine = AsyncEngine(config, clients)
    await engine.start()
    async with asyncio.timeout(60):
        deltas = engine.generate([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
        await anext(deltas)
        clients.kill()
        with pytest.raises(RequestFailed):
            async for _ in deltas:
                pass
        with pytest.raises(EngineUnavailable):
            await collect(engine, SamplingParams(max_tokens=1))
        while engine.ready is None:
            assert engine.status == "restarting"
            await asyncio.sleep(0.01)
        assert (await collect(engine, SamplingParams(max_tokens=3))).num_output_tokens == 3
    await engine.close()


async def test_an_engine_that_dies_three_times_stays_down(config: EngineConfig) -> None:
    clients = Clients()
    engine = AsyncEngine(config, clients)
    await engine.start()
    async with asyncio.timeout(100):
        for _ in range(MAX_DEATHS):
            while engine.ready is None:
                await asyncio.sleep(0.01)
            clients.kill()
            while engine.ready is not None:
                await asyncio.sleep(0.01)
        await engine.wait_dead()
    assert engine.status == "dead"
    with pytest.raises(EngineUnavailable, match="dead"):
        await collect(engine, SamplingParams(max_tokens=1))
    await engine.close()


async def test_the_engine_process_ends_with_its_socket(config: EngineConfig) -> None:
    client = ProcessClient(config)
    await client.start()
    pid = client.pid
    await client.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineUnavailable):
        client.abort(["0"])


async def test_settings_at_fault_are_told_from_a_crash(config: EngineConfig) -> None:
    engine = AsyncEngine(EngineConfig(model=config.model, max_model_len=100_000))
    with pytest.raises(ConfigError, match="2048"):
        await engine.start()
    assert engine.status == "dead"
    await engine.close()


async def test_a_process_that_dies_while_it_loads_is_reported(config: EngineConfig, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDied, match="code 1"):
        await ProcessClient(config).start()


def test_the_api_process_never_imports_torch() -> None:
    code = (
        "import sys, radixserve.api.app, radixserve.cli.serve;"
        "sys.exit(sorted({'torch', 'transformers'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

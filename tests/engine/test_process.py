"""The engine process: spoken to over its socket, killed, started again, never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from radixserve.config import EngineConfig
from radixserve.engine.answer import GenerationResult
from radixserve.engine.async_engine import MAX_DEATHS, AsyncEngine
from radixserve.engine.client import THREAD_ENVIRONMENT, ProcessClient
from radixserve.engine.in_process import in_process_engine
from radixserve.errors import ConfigError, EngineDied, EngineUnavailable, RequestFailed
from radixserve.grammar import Grammar
from radixserve.protocol import AddRequest, CacheWasReset, PinAt, ResetCache, ShowTenant
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
    constrained = SamplingParams(n=2, seed=1, max_tokens=20, grammar=Grammar("regex", "yes|no"))
    results, shown = [], []
    for engine in (AsyncEngine(config), in_process_engine(config)):
        await engine.start()
        results.append([await collect(engine, each) for each in (params, constrained)])
        shown.append(await engine.control(ShowTenant(None)))
        reply = await engine.control(ResetCache())
        assert reply.num_kept_blocks == 0
        assert await engine.control(ResetCache("nobody")) == CacheWasReset(0, 0)
        await engine.close()
    assert results[0] == results[1]
    assert shown[0] == shown[1]
    assert shown[0].num_cached_blocks > 0
    assert len(results[0][0].answers[1].token_ids) == 20
    assert {answer.text for answer in results[0][1].answers} <= {"yes", "no"}


async def test_an_idle_engine_tells_that_the_time_of_a_pin_is_over(config: EngineConfig) -> None:
    engine = AsyncEngine(config)
    await engine.start()
    async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=1), pins=[PinAt("p", 3, 0.2)]):
        pass
    async with asyncio.timeout(20):
        while engine.stats is None or engine.stats.cache.num_pinned_blocks:
            await asyncio.sleep(0)
    await engine.close()


async def test_who_has_reset_the_cache_finds_it_empty(config: EngineConfig) -> None:
    engine = AsyncEngine(config)
    await engine.start()
    for _ in range(10):
        await collect(engine, SamplingParams(max_tokens=20, ignore_eos=True))
        reply = await engine.control(ResetCache())
        assert reply.num_dropped_blocks > 0
        assert engine.stats is not None
        assert engine.stats.cache.num_cached_blocks == 0
    await engine.close()


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


async def test_the_engine_process_knows_no_api_keys(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXSERVE_API_KEY", "s3cret")
    client = ProcessClient(msgspec.structs.replace(config, api_key=("s3cret",)))
    await client.start()
    environment = Path(f"/proc/{client.pid}/environ").read_text()
    assert "s3cret" not in environment
    await client.stop()


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
async def test_waiting_threads_of_the_engine_spin_briefly_unless_told_otherwise(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name in THREAD_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    client = ProcessClient(config)
    await client.start()
    variables = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{client.pid}/environ").read_text().split("\0") if entry
    )
    told = {name: value for name, value in variables.items() if name in THREAD_ENVIRONMENT}
    assert told == (given or THREAD_ENVIRONMENT)
    await client.stop()


async def test_the_engine_process_ends_with_its_socket(config: EngineConfig) -> None:
    client = ProcessClient(config)
    await client.start()
    pid = client.pid
    await client.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    client.abort(["0"])
    with pytest.raises(EngineUnavailable):
        await client.control(ResetCache())


async def test_an_engine_that_hangs_is_killed_and_leaves_no_caller_waiting(config: EngineConfig, monkeypatch) -> None:
    monkeypatch.setattr("radixserve.engine.client.STOP_SECONDS", 0.1)
    client = ProcessClient(config)
    await client.start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    # Far more than the socket's buffers take.
    client.add(AddRequest("0", bytes(8 * 2**20), SamplingParams()))
    control = asyncio.create_task(client.control(ResetCache()))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await client.stop()
        with pytest.raises(EngineUnavailable):
            await control
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)


async def test_what_is_no_message_counts_as_a_death(tmp_path: Path, monkeypatch) -> None:
    liar = tmp_path / "liar"
    liar.write_text(
        f"#!{sys.executable}\n"
        "import socket, sys\n"
        "peer = socket.socket(fileno=int(sys.argv[-1]))\n"
        "peer.sendall(bytes([2, 0, 0, 0, 0xC1, 0xC1]))\n"
        "peer.recv(1 << 20), peer.recv(1)\n"
    )
    liar.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(liar))
    with pytest.raises(EngineDied, match="no message"):
        await ProcessClient(EngineConfig()).start()


async def test_the_engine_process_imports_nothing_from_the_working_directory(
    config: EngineConfig, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "gguf.py").write_text("raise SystemExit('the wrong gguf')")
    monkeypatch.chdir(tmp_path)
    client = ProcessClient(config)
    assert (await client.start()).num_blocks == 256
    await client.stop()


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

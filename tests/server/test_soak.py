"""Two thousand mixed requests with aborts on a pool that is too small: nothing leaks, nothing sticks."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running_server import running_server
from tests.tiny_engine import write_tiny_engine

NUM_REQUESTS = 2000
CONCURRENCY = 24
MAX_GROWTH = 0.03


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss line")


def random_body(chance: random.Random, prefixes: list[list[int]]) -> dict[str, Any]:
    prefix = chance.choice(prefixes)
    prompt = prefix[: chance.randrange(len(prefix))] + [chance.randrange(256) for _ in range(chance.randrange(1, 60))]
    body = {"prompt": prompt, "max_tokens": chance.randrange(1, 60), "n": chance.choice([1, 1, 1, 2, 3])}
    body |= {"temperature": chance.choice([0, 0.8]), "stream": chance.random() < 0.6}
    if chance.random() < 0.3:
        body |= {"logprobs": 2, "frequency_penalty": 0.5, "stop": ["zz"], "seed": 3}
    return body


async def send(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> None:
    """Send one request; leave_after: read so many lines of the answer, or so many ms of silence, and hang up."""
    if not body["stream"]:
        timeout = httpx.Timeout(60.0, read=60.0 if leave_after is None else 0.002 * (1 + leave_after))
        with suppress(httpx.ReadTimeout):
            response = await client.post("/v1/completions", json=body, timeout=timeout)
            assert response.status_code == 200, response.text
        return
    async with client.stream("POST", "/v1/completions", json=body, timeout=60.0) as response:
        assert response.status_code == 200
        events: list[str] = []
        async for line in response.aiter_lines():
            if line:
                events.append(line)
            assert '"error"' not in line
            if leave_after is not None and len(events) > leave_after:
                return
        assert events[-1] == "data: [DONE]"


async def run_half(client: httpx.AsyncClient, seed: int) -> None:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(256) for _ in range(150)] for _ in range(4)]
    places = asyncio.Semaphore(CONCURRENCY)

    async def one() -> None:
        async with places:
            leave_after = chance.randrange(12) if chance.random() < 0.3 else None
            await send(client, random_body(chance, prefixes), leave_after)

    await asyncio.gather(*(one() for _ in range(NUM_REQUESTS // 2)))


async def wait_idle(client: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            cache = (await client.get("/v1/cache")).json()
            if cache["blocks"]["in_use"] == cache["requests"]["running"] == cache["requests"]["waiting"] == 0:
                return cache
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.anyio
async def test_two_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path) -> None:
    model = write_tiny_engine(tmp_path)
    flags = [
        "--num-kv-blocks",
        "40",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "64",
        "--log-level",
        "warning",
    ]
    with running_server(str(model), *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=64)) as client:
            sizes = []
            for half in range(2):
                await run_half(client, half)
                await wait_idle(client)
                sizes.append([resident_bytes(pid) for pid in (server.process.pid, server.engine_pid)])
            cache = await wait_idle(client)
            metrics = (await client.get("/metrics")).text
    blocks = cache["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["in_use"] == blocks["total"] == 40
    preemptions = [line for line in metrics.splitlines() if line.startswith("radixserve_preemptions_total")]
    assert float(preemptions[0].split()[-1]) > 0, "the pool was not small enough to test anything"
    for before, after in zip(*sizes, strict=True):
        assert after < before * (1 + MAX_GROWTH), f"memory grew from {before} to {after} bytes"

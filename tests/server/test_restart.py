"""A server with a disk below its cache, ended and started again."""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running_server import RunningServer, running_server, start_server
from tests.tiny_engine import write_tiny_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_BLOCKS = ("--num-kv-blocks", "512")
NUM_KILLS = 50
NUM_KILLS_OF_THE_DEMO_MODEL = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("tiny"))


def conversations(seed: int, num_agents: int = 4, num_turns: int = 5) -> list[list[int]]:
    """Prompts of agents with long instructions in common, each turn going on from the one before."""
    rng = random.Random(seed)
    instructions = [rng.randrange(250) for _ in range(300)]
    histories = [list(instructions) for _ in range(num_agents)]
    prompts = []
    for _ in range(num_turns):
        for history in histories:
            history += [rng.randrange(250) for _ in range(rng.randrange(20, 120))]
            prompts.append(list(history))
    return prompts


def answer(server: RunningServer, prompt: list[int]) -> dict[str, Any]:
    """The answer's token ids, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    content = response.json()
    return {
        "token_ids": content["choices"][0]["token_ids"],
        "cached": content["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


def stop(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_ended() == 0


def tier(server: RunningServer) -> dict[str, Any]:
    (found,) = httpx.get(f"{server.url}/v1/cache").json()["tiers"]
    assert isinstance(found, dict)
    return found


def test_after_a_clean_stop_the_same_requests_hit_what_they_hit_before(model: Path, tmp_path: Path) -> None:
    arguments = (str(model), "--dtype", "float32", *NUM_BLOCKS, "--kv-cache-dir", str(tmp_path / "cache"))
    prompts = conversations(1)
    with running_server(*arguments) as server:
        before = [answer(server, prompt) for prompt in prompts]
        stop(server)
    with running_server(*arguments) as server:
        assert tier(server)["blocks"] > 0
        after = [answer(server, prompt) for prompt in prompts]
        assert tier(server)["hit_blocks"] > 0
        assert tier(server)["failed_blocks"] == 0
    assert [turn["token_ids"] for turn in after] == [turn["token_ids"] for turn in before]
    assert sum(turn["cached"] for turn in after) >= 0.95 * sum(turn["cached"] for turn in before)
    assert after[0]["cached"] >= len(prompts[0]) - 16


def test_a_second_server_cannot_use_the_directory(model: Path, tmp_path: Path) -> None:
    arguments = (str(model), *NUM_BLOCKS, "--kv-cache-dir", str(tmp_path / "cache"))
    with running_server(*arguments):
        second = start_server(*arguments, "--port", "0")
        assert second.wait_ended() == 2
        errors = [line for line in second.output if line.startswith("radixserve: error:")]
        assert len(errors) == 1, second.output
        assert "--kv-cache-dir" in errors[0]


def test_a_save_is_told_and_another_one_has_nothing_to_do(model: Path, tmp_path: Path) -> None:
    with running_server(str(model), *NUM_BLOCKS, "--kv-cache-dir", str(tmp_path / "cache")) as server:
        answer(server, conversations(1)[0])
        first, second = (httpx.post(f"{server.url}/v1/cache/save", timeout=60).json() for _ in range(2))
        assert first["object"] == "cache.save"
        assert first["saved_blocks"] == tier(server)["blocks"] > 0
        assert second["saved_blocks"] == 0


def test_after_a_kill_during_a_save_every_start_serves_right_answers(model: Path, tmp_path: Path) -> None:
    check_kills((str(model), "--dtype", "float32", *NUM_BLOCKS), NUM_KILLS, tmp_path)


def test_so_it_is_with_the_demo_model(tmp_path: Path) -> None:
    check_kills(("--dtype", "float32", *NUM_BLOCKS), NUM_KILLS_OF_THE_DEMO_MODEL, tmp_path)


def check_kills(arguments: tuple[str, ...], num_kills: int, tmp_path: Path) -> None:
    """Each save is of blocks that are new, beside what the last start has left."""
    rng = random.Random(0)
    workloads = [conversations(seed, num_turns=2) for seed in range(num_kills)]
    with running_server(*arguments) as server:
        expected = [[answer(server, prompt)["token_ids"] for prompt in prompts] for prompts in workloads]
    num_restored = 0
    for seed in range(num_kills):
        with running_server(*arguments, "--kv-cache-dir", str(tmp_path / "cache")) as server:
            for known in range(max(seed - 1, 0), seed + 1):
                turns = [answer(server, prompt) for prompt in workloads[known]]
                assert [turn["token_ids"] for turn in turns] == expected[known]
                num_restored += turns[0]["cached"] if known < seed else 0
            killer = threading.Timer(rng.uniform(0.0, 0.2), kill, (server,))
            killer.start()
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/cache/save", timeout=60)
            killer.join()
    assert num_restored > 0


def kill(server: RunningServer) -> None:
    """End both processes at once, so that the one does not start the other again."""
    engine_pid = server.engine_pid
    server.process.kill()
    os.kill(engine_pid, signal.SIGKILL)

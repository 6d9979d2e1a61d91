"""Public prefixes of a server as a user starts it: from a file to the engine's process."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.server.running_server import START_DEADLINE, RunningServer, running_server, start_server
from tests.tiny_engine import write_tiny_engine

TEXT = "Once upon a time there was a king"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("tiny"))


def num_cached(server: RunningServer, key: str) -> int:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": f"{TEXT} of old", "max_tokens": 1},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_wrong_entry_is_one_line_and_exit_code_2(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text('[{"prompt": "short"}]')
    server = start_server(str(model), "--public-prefixes", str(file))
    assert server.wait_ended() == 2
    errors = [line for line in server.output if line.startswith("radixserve: error:")]
    assert len(errors) == 1, server.output
    assert f"--public-prefixes {file}: entry [0] gives prompts less than a block" in errors[0]
    assert "Traceback" not in "".join(server.output)


@pytest.mark.slow
def test_tenants_share_them_also_after_the_file_is_gone_and_the_engine_was_started_again(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(f'[{{"prompt": "{TEXT}"}}]')
    arguments = ("--api-key", "a=first", "--api-key", "b=second", "--public-prefixes", str(file))
    with running_server(str(model), *arguments) as server:
        file.unlink()
        assert [num_cached(server, key) for key in ("first", "second")] == [0, 32]
        os.kill(server.engine_pid, signal.SIGKILL)
        deadline = time.monotonic() + START_DEADLINE
        seen = {httpx.get(f"{server.url}/ready").status_code}
        while seen != {503} and time.monotonic() < deadline:
            seen = {httpx.get(f"{server.url}/ready").status_code}
        while httpx.get(f"{server.url}/ready").status_code == 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # the engine that loads needs the processor more
        assert [num_cached(server, key) for key in ("first", "second")] == [0, 32]

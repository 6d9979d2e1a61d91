"""The server as a process: what it says when it cannot start, and how it ends."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from radixserve.model_path import resolve_model_path
from tests.server.running_server import START_DEADLINE, RunningServer, running_server, start_server
from tests.tiny_engine import write_tiny_engine

BODY = {"prompt": [1, 2, 3], "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("tiny"))


def assert_fails(arguments: list[str], *words: str) -> None:
    server = start_server(*arguments)
    assert server.wait_ended() == 2
    errors = [line for line in server.output if line.startswith("radixserve: error:")]
    assert len(errors) == 1, server.output
    assert "Traceback" not in "".join(server.output)
    for word in words:
        assert word in errors[0]


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    assert_fails([str(tmp_path / "nothing")], "no model at")


def test_a_truncated_gguf_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(resolve_model_path(None).read_bytes()[:1_000_000])
    assert_fails([str(path)], "cut.gguf")


def test_an_invalid_chat_template_is_one_line(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}")
    assert_fails([str(model), "--chat-template", str(template)], "broken.jinja")


def test_a_port_in_use_is_one_line(model: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert_fails([str(model), "--port", str(listener.getsockname()[1])], "--port")


def test_no_memory_for_the_blocks_is_one_line(model: Path) -> None:
    assert_fails([str(model), "--port", "0", "--num-kv-blocks", str(10**9)], "blocks")


def test_a_context_above_the_models_own_is_one_line(model: Path) -> None:
    assert_fails([str(model), "--port", "0", "--max-model-len", "5000"], "2048")


def stream_until_it_ends(server: RunningServer, events: list[str], began: threading.Event) -> None:
    body = {**BODY, "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                events.append(line)
                began.set()


def start_stream(server: RunningServer) -> tuple[threading.Thread, list[str]]:
    """Begin to read an answer that takes seconds; return the reader and the events it has got."""
    events: list[str] = []
    began = threading.Event()
    thread = threading.Thread(target=stream_until_it_ends, args=(server, events, began), daemon=True)
    thread.start()
    assert began.wait(30)
    return thread, events


def test_a_killed_engine_ends_streams_with_an_error_and_is_back_within_ten_seconds(model: Path) -> None:
    """On a machine so busy that a start of the server takes longer than that, within twice the time of a start."""
    began = time.monotonic()
    with running_server(str(model)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        limit = max(10.0, 2 * (time.monotonic() - began))
        thread, events = start_stream(server)
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        thread.join(limit)
        assert not thread.is_alive()
        assert '"error"' in events[-1]
        saw_503 = False
        while client.get("/health").status_code == 503:
            saw_503 = True
            assert time.monotonic() - killed < limit
            time.sleep(0.05)  # the engine that loads needs the processor more
        assert saw_503
        answer = client.post("/v1/completions", json={**BODY, "max_tokens": 3})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(model: Path) -> None:
    with (
        running_server(str(model), "--shutdown-timeout", "60") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        client.get("/health").raise_for_status()
        thread, events = start_stream(server)
        server.process.terminate()
        while client.get("/ready").status_code == 200:
            time.sleep(0.01)
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        thread.join(60)
        assert not thread.is_alive()
        assert events[-1] == "data: [DONE]"
        assert server.wait_ended() == 0


def test_after_the_shutdown_timeout_open_streams_end_with_an_error(model: Path) -> None:
    with running_server(str(model), "--shutdown-timeout", "0.1") as server:
        thread, events = start_stream(server)
        server.process.terminate()
        thread.join(30)
        assert '"error"' in events[-1]
        assert server.wait_ended() == 0


def is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_is_left_behind_when_the_server_is_killed(model: Path) -> None:
    with running_server(str(model)) as server:
        engine_pid = server.engine_pid
        server.process.kill()
        deadline = time.monotonic() + START_DEADLINE
        while is_running(engine_pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)

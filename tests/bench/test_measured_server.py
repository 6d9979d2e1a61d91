import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from radixserve.bench.measured_server import MeasuredServer, descendants, parse_server, paused
from radixserve.errors import ConfigError

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are found in /proc")
pytestmark = needs_proc

DEADLINE = 10.0
# A server whose thread, not its main one, has started a process; both end when their input does.
WITH_A_CHILD = """
import subprocess, sys, threading
start = lambda: children.append(subprocess.Popen([sys.executable, "-c", "input()"]))
children = []
thread = threading.Thread(target=lambda: (start(), print("up", flush=True), children[0].wait()))
thread.start()
thread.join()
"""


@pytest.fixture
def server() -> Iterator[MeasuredServer]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WITH_A_CHILD], stderr=subprocess.DEVNULL, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        processes = descendants(process.pid)
        yield MeasuredServer("server", "http://127.0.0.1:1/v1", process.pid)
        # Stopped ones would never end by themselves.
        for pid in processes:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def idle_processes(count: int) -> Iterator[list[int]]:
    with ExitStack() as stack:
        command = [sys.executable, "-c", "input()"]
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL))
            for _ in range(count)
        ]
        yield [process.pid for process in processes]
        for process in processes:
            process.kill()


def is_stopped(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def wait_until(pid: int, *, stopped: bool) -> None:
    """A signal is on its way for a moment."""
    deadline = time.monotonic() + DEADLINE
    while is_stopped(pid) != stopped:
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_paused_server_stands_still_with_all_its_processes_and_then_goes_on(server: MeasuredServer) -> None:
    assert server.pid is not None
    processes = descendants(server.pid)
    assert len(processes) == 2
    with paused([server]):
        for process in processes:
            wait_until(process, stopped=True)
    for process in processes:
        wait_until(process, stopped=False)


def test_a_paused_server_goes_on_after_an_error(server: MeasuredServer) -> None:
    pid = server.pid
    assert pid is not None

    def fail_while_paused() -> None:
        with paused([server]):
            wait_until(pid, stopped=True)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_while_paused()
    wait_until(pid, stopped=False)


def test_a_server_without_a_known_process_is_left_as_it_is(server: MeasuredServer) -> None:
    assert server.pid is not None
    with paused([MeasuredServer("other", server.url)]):
        assert not is_stopped(server.pid)


def test_a_server_that_has_ended_is_passed_over() -> None:
    with idle_processes(1) as (pid,):
        pass
    with paused([MeasuredServer("gone", "http://127.0.0.1:1/v1", pid)]):
        pass


def test_a_server_is_a_name_a_url_and_perhaps_a_process_and_a_model(server: MeasuredServer) -> None:
    url = "http://127.0.0.1:1/v1"
    assert parse_server(f"a={url}") == MeasuredServer("a", url)
    assert parse_server(f"a={url},{server.pid}") == MeasuredServer("a", url, server.pid)
    assert parse_server(f"a={url},{server.pid},/m=1") == MeasuredServer("a", url, server.pid, "/m=1")
    assert parse_server(f"a={url},org/model") == MeasuredServer("a", url, None, "org/model")


@pytest.mark.parametrize("text", ["", "http://127.0.0.1:1/v1", "a=", "=http://127.0.0.1:1", "a=http://h,model,more"])
def test_a_server_written_otherwise_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=URL"):
        parse_server(text)


@pytest.mark.parametrize("url", ["nowhere", "127.0.0.1:1", "ftp://h"])
def test_a_url_of_no_server_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="must be like http"):
        parse_server(f"a={url}")


def test_a_process_that_is_not_there_is_a_config_error() -> None:
    with idle_processes(1) as (pid,):
        pass
    with pytest.raises(ConfigError, match="there is none"):
        parse_server(f"a=http://127.0.0.1:1/v1,{pid}")


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()], ids=["itself", "its parent"])
def test_a_process_above_this_one_is_a_config_error(pid: int) -> None:
    with pytest.raises(ConfigError, match="cannot be stopped"):
        parse_server(f"a=http://127.0.0.1:1/v1,{pid}")

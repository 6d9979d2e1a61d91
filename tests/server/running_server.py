"""`radixserve serve` as a user starts it: a process of its own, on a free port."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_DEADLINE = 60.0


class RunningServer:
    """A server process, its address and what it printed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.output: list[str] = []
        self.url = ""
        self._is_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_up(self) -> None:
        """Return when the start-up table is printed."""
        assert self._is_up.wait(START_DEADLINE), "".join(self.output)
        assert self.url, "".join(self.output)

    def wait_ended(self) -> int:
        """Return the exit code, once the process has ended."""
        code = self.process.wait(START_DEADLINE)
        self._reader.join(START_DEADLINE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    @property
    def engine_pid(self) -> int:
        """The engine process, the server's only child."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line)
            if "http://" in line and not self.url:
                self.url = line.split()[-1].removesuffix("/v1")
                self._is_up.set()
        self._is_up.set()


def start_server(*arguments: str) -> RunningServer:
    """Start `radixserve serve` with these arguments; do not wait."""
    command = [sys.executable, "-m", "radixserve", "serve", *arguments]
    return RunningServer(subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True))


@contextmanager
def running_server(*arguments: str) -> Iterator[RunningServer]:
    """Yield a server that is up; kill it afterwards if it still runs."""
    server = start_server(*arguments, "--port", "0")
    try:
        server.wait_up()
        yield server
    finally:
        server.process.kill()
        server.wait_ended()

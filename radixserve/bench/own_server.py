"""A server of this checkout, started to be measured."""

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from radixserve.bench.measured_server import MeasuredServer
from radixserve.errors import ConfigError

READY_SECONDS = 300.0


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[MeasuredServer]:
    """Start a server on a free port, yield it when it is ready, and end it. Raises ConfigError if it does not start.

    Its process is not told, so that it is never stopped: it sleeps when it has nothing to do.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "radixserve", "serve", *flags, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise ConfigError(f"radixserve did not start: {log.read().strip()}")
                time.sleep(0.1)
            yield MeasuredServer("radixserve", f"http://127.0.0.1:{port}/v1")
        finally:
            process.terminate()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False

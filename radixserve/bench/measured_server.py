"""The servers of a comparison, and how the others are kept quiet while one is measured."""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from radixserve.bench.server import server_root
from radixserve.errors import ConfigError


class MeasuredServer(msgspec.Struct, frozen=True):
    """A running server. pid: its process, to be stopped while others are measured; None leaves it as it is.

    model: None takes the first one that the server lists.
    """

    name: str
    url: str
    pid: int | None = None
    model: str | None = None


def parse_server(text: str) -> MeasuredServer:
    """Return the server of NAME=URL[,PID][,MODEL].

    Raises ConfigError if it is written otherwise, if the URL is no server's, or if the process is not there, not ours,
    or above this one.
    """
    name, _, rest = text.partition("=")
    url, *more = rest.split(",")
    pid = int(more.pop(0)) if more and more[0].isdecimal() else None
    if not name or not url or len(more) > 1:
        raise ConfigError(f"a server is {text!r}; it must be NAME=URL, NAME=URL,PID or NAME=URL,PID,MODEL")
    server_root(url)
    if pid is not None:
        processes = descendants(pid)
        if not processes:
            raise ConfigError(f"{name} has the process {pid}; there is none, or this system has no /proc")
        if os.getpid() in processes:
            raise ConfigError(f"{name} has the process {pid}, which started this one: it cannot be stopped")
        try:
            os.kill(pid, 0)
        except PermissionError:
            raise ConfigError(f"{name} has the process {pid}, which is another user's: it cannot be stopped") from None
    return MeasuredServer(name, url, pid, more[0] if more else None)


def descendants(pid: int) -> list[int]:
    """Return a process and all below it, parents first; nothing if it is gone."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):
        # A child belongs to the thread that forked it.
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            for child in (thread / "children").read_text().split():
                found += descendants(int(child))
        return found
    return []


@contextmanager
def paused(servers: Iterable[MeasuredServer]) -> Iterator[None]:
    """Stop the servers whose process is known, with all processes below it, and let them go on at the end.

    A server that waits for work by polling would take the cores of the one that is measured. A process that is gone is
    passed over: its server's next run fails, and says so.
    """
    processes = [process for server in servers if server.pid is not None for process in descendants(server.pid)]
    try:
        _signal(processes, signal.SIGSTOP)
        yield
    finally:
        _signal(reversed(processes), signal.SIGCONT)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)

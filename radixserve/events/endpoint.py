"""Addresses of ZeroMQ sockets, as far as two processes can meet at them."""

import re

from radixserve.errors import ConfigError

_TCP = re.compile(r"tcp://[^/]+:([0-9]{1,5})")
_IPC = re.compile(r"ipc://[^*]+")
_MAX_PORT = 65535


def check_endpoint(endpoint: str, flag: str) -> None:
    """Raise ConfigError, which names the flag, unless an endpoint is tcp://host:port or ipc://path.

    ZeroMQ takes more: a port or path of its own choice, which nobody learns of, the lower 16 bits of a number that is
    no port, and addresses within the process.
    """
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None and endpoint.startswith("tcp://"):
        raise ConfigError(f"{flag} is {endpoint!r}: it needs a host and the number of a port, as in tcp://*:5557")
    if tcp is not None and not 1 <= int(tcp[1]) <= _MAX_PORT:
        raise ConfigError(f"{flag} is {endpoint!r}: a port is 1 to {_MAX_PORT}, as in tcp://*:5557")
    if tcp is None and _IPC.fullmatch(endpoint) is None:
        raise ConfigError(f"{flag} is {endpoint!r}: give an address like tcp://*:5557 or ipc:///run/events")


def is_bound(endpoint: str) -> bool:
    """Whether an endpoint of events is bound: it has a wildcard or names a file. Others are connected to."""
    return "*" in endpoint or "://[::]" in endpoint or "://0.0.0.0" in endpoint or endpoint.startswith("ipc://")

"""Batches of events on ZeroMQ: a PUB socket for what happens, a ROUTER socket for what a subscriber has missed."""

import logging
import threading
import time

import msgspec
import zmq

from radixserve.errors import ConfigError
from radixserve.events.replay_buffer import ReplayBuffer
from radixserve.events.schema import Event, EventBatch

# Batches that wait for a subscriber that is slow. It loses those beyond, which it sees by their numbers.
MAX_UNREAD = 100_000
# Batches that a replay gives as they were.
DEFAULT_BUFFER_SIZE = 10_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_MAX_PORT = 65535
_LINGER_MS = 1000

_log = logging.getLogger(__name__)


class EventPublisher:
    """Publishes batches as [topic, number, payload], numbered from 0 in 8 big-endian bytes.

    endpoint: bound if it has a wildcard or names a file, as in tcp://*:5557 or ipc:///run/events, else connected to.
    replay_endpoint: bound. A number sent there is answered by [number, payload] for each batch from that one on, as
    ReplayBuffer keeps them, and then by END_OF_REPLAY with an empty payload.
    Raises ConfigError if an endpoint is none, or is in use. To be closed.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_size: int = DEFAULT_BUFFER_SIZE,
    ) -> None:
        self._num_batches = 0
        self._topic = topic.encode()
        self._buffer: ReplayBuffer | None = None
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, MAX_UNREAD)
            _open(self._pub, endpoint, binds=_is_bound(endpoint), flag="--kv-events-endpoint")
            if replay_endpoint is None:
                return
            # What finds no room is lost, and room is given back by halves: there is some for a whole answer even so.
            router = self._socket(zmq.ROUTER, 4 * (buffer_size + 2))
            _open(router, replay_endpoint, binds=True, flag="--kv-events-replay-endpoint")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        # The thread only wakes for replays. Were it to publish, each batch would make a step wait for the
        # interpreter's lock, and that for as long as the thread is kept from running.
        self._buffer = ReplayBuffer(buffer_size)
        threading.Thread(target=_serve_replays, args=(router, self._buffer), name="kv-events", daemon=True).start()

    def publish(self, events: list[Event]) -> None:
        """Publish one batch, from one thread at a time. A PUB socket takes it at once, whoever reads it or does not."""
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events))
        number = self._num_batches.to_bytes(8, "big")
        self._num_batches += 1
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
        if self._buffer is not None:
            self._buffer.add(number, payload)

    def close(self) -> None:
        """Close the sockets; what subscribers have not got yet has a second to leave."""
        self._pub.close(_LINGER_MS)
        # Ends the poll of the thread, which closes its own socket.
        self._context.term()

    def _socket(self, kind: int, max_messages: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(max_messages)
        return socket


def _serve_replays(router: "zmq.Socket[bytes]", buffer: ReplayBuffer) -> None:
    """Answer requests, with or without the empty frame that a REQ socket puts before them, until the context ends."""
    try:
        while True:
            *envelope, start = router.recv_multipart()
            if len(start) != len(END_OF_REPLAY):
                _log.warning("a replay of KV events was asked for with %d bytes, and not the 8 of a number", len(start))
                continue
            for number, payload in buffer.batches_from(start):
                router.send_multipart((*envelope, number, payload))
            router.send_multipart((*envelope, END_OF_REPLAY, b""))
    except zmq.ContextTerminated:
        pass  # as close() tells the thread to end
    finally:
        router.close(linger=0)


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "://[::]" in endpoint or "://0.0.0.0" in endpoint or endpoint.startswith("ipc://")


def _open(socket: "zmq.Socket[bytes]", endpoint: str, *, binds: bool, flag: str) -> None:
    port = endpoint.rpartition(":")[2]
    if port.isdigit() and int(port) > _MAX_PORT:
        # ZeroMQ would take the lower 16 bits of it.
        raise ConfigError(f"{flag} is {endpoint!r}: there is no such port; give one like tcp://*:5557")
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag} is {endpoint!r}: {error.strerror}; give one like tcp://*:5557") from None

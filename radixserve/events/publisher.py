"""Batches of events on ZeroMQ: a PUB socket for what happens, a ROUTER socket for what a subscriber has missed."""

import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from radixserve.errors import ConfigError
from radixserve.events.schema import Event, EventBatch

# Batches that wait for the publisher's thread, and for a subscriber that is slow. Beyond them batches are left out,
# which a subscriber sees by their numbers.
MAX_WAITING = 10_000
MAX_UNREAD = 100_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_MAX_PORT = 65535
_STOP = b""
_CLOSE_SECONDS = 1.0

_log = logging.getLogger(__name__)


class EventPublisher:
    """Publishes batches as [topic, number, payload], numbered from 0 in 8 big-endian bytes; publish never waits.

    endpoint: bound if it has a wildcard or names a file, as in tcp://*:5557 or ipc:///run/events, else connected to.
    replay_endpoint: bound. A number sent there is answered by [number, payload] for each of the last buffer_size
    batches from that one on, and then by END_OF_REPLAY with an empty payload.
    num_dropped: batches that were left out, as the thread did not keep up. Raises ConfigError if an endpoint is none,
    or is in use. To be closed.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_size: int = 10_000,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.num_dropped = 0
        self._num_batches = 0
        self._topic = topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_size)
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, MAX_UNREAD)
            _open(self._pub, endpoint, binds=_is_bound(endpoint), flag="--kv-events-endpoint")
            # Room for all that one request is answered with, as what finds no room is lost.
            self._router = self._socket(zmq.ROUTER, buffer_size + 1)
            if replay_endpoint is not None:
                _open(self._router, replay_endpoint, binds=True, flag="--kv-events-replay-endpoint")
            # A socket between the threads, so that one poll waits for batches and for replays.
            self._waiting_out = self._socket(zmq.PAIR, max_waiting)
            self._waiting_out.bind("inproc://batches")
            self._waiting_in = self._socket(zmq.PAIR, 1)
            self._waiting_in.connect("inproc://batches")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Publish one batch. From one thread at a time."""
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events))
        try:
            self._waiting_out.send_multipart((self._num_batches.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        except zmq.Again:
            if not self.num_dropped:
                _log.warning(
                    "KV events come faster than they can be published; batch %d is left out", self._num_batches
                )
            self.num_dropped += 1
        self._num_batches += 1

    def close(self) -> None:
        """Publish what waits, as far as it takes no longer than a second, and close the sockets."""
        self._waiting_out.setsockopt(zmq.SNDTIMEO, int(_CLOSE_SECONDS * 1000))
        try:
            self._waiting_out.send(_STOP)
        except zmq.Again:
            _log.warning("the last KV events are left out")
        self._thread.join(_CLOSE_SECONDS)
        self._context.destroy(linger=int(_CLOSE_SECONDS * 1000))

    def _socket(self, kind: int, max_messages: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(max_messages)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waiting_in, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            # What waits goes first, so that a replay ends with what was published before it was asked for.
            if not self._publish_waiting():
                return
            if self._router in ready:
                self._replay(self._router.recv_multipart())

    def _publish_waiting(self) -> bool:
        """Publish the batches that wait; return False once there will be no more."""
        while True:
            try:
                message = self._waiting_in.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if message == [_STOP]:
                return False
            number, payload = message
            self._pub.send_multipart((self._topic, number, payload))
            self._buffer.append((number, payload))

    def _replay(self, request: list[bytes]) -> None:
        """Answer a request, with or without the empty frame that a REQ socket puts before it."""
        *envelope, start = request
        if len(start) != len(END_OF_REPLAY):
            _log.warning("a replay of KV events was asked for with %d bytes, and not the 8 of a number", len(start))
            return
        # Of equal length and big-endian, numbers compare as their bytes do.
        for number, payload in self._buffer:
            if number >= start:
                self._router.send_multipart((*envelope, number, payload))
        self._router.send_multipart((*envelope, END_OF_REPLAY, b""))


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

"""A subscriber as a router is one, written from vLLM's schema and protocol alone."""

from typing import Any

import msgspec
import zmq

DEADLINE_MS = 10_000
END = (-1).to_bytes(8, "big", signed=True)


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Router:
    """Knows which blocks a server has cached, from what it is told; checks that this is told in a possible order.

    parents: of each cached block, the one before it. token_ids: those of each, where they were told.
    """

    def __init__(self) -> None:
        self.parents: dict[Any, Any] = {}
        self.token_ids: dict[Any, list[int]] = {}
        self.num_cleared = 0

    def read(self, payload: bytes) -> None:
        """Take in one batch."""
        for event in decode(payload).events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    for name in event.block_hashes:
                        assert name not in self.parents.values(), "removed before what follows it"
                        del self.parents[name]
                        self.token_ids.pop(name, None)
                case Cleared():
                    self.parents.clear()
                    self.token_ids.clear()
                    self.num_cleared += 1

    def _store(self, event: Stored) -> None:
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            assert name not in self.parents, "stored twice"
            assert parent is None or parent in self.parents, "stored before what it follows"
            self.parents[name] = parent
            if event.token_ids:
                self.token_ids[name] = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            parent = name


class Subscriber:
    """The sockets of a router; what it receives, it hands over with its number. To be used in `with`."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: bytes = b"", *, max_unread: int = 0
    ) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._sub.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        self._sub.set_hwm(max_unread)
        self._sub.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        self._replay.set_hwm(0)
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive(self) -> tuple[int, bytes]:
        """Wait for the next batch."""
        _, number, payload = self._sub.recv_multipart()
        return int.from_bytes(number, "big"), payload

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a batch so long; return whether there is one."""
        return bool(self._sub.poll(timeout_ms))

    def ask(self, frames: list[bytes]) -> None:
        """Send something to where replays are asked for."""
        self._replay.send_multipart(frames)

    def receive_topic(self) -> bytes:
        """Wait for the next batch, and return its topic."""
        return self._sub.recv_multipart()[0]

    def replay(self, start: int, *, delimiter: bool = True) -> list[tuple[int, bytes]]:
        """Ask for the batches from a number on. delimiter: with the empty frame that a REQ socket sends."""
        self._replay.send_multipart([*([b""] if delimiter else []), start.to_bytes(8, "big")])
        batches = []
        while True:
            *empty, number, payload = self._replay.recv_multipart()
            assert empty == ([b""] if delimiter else [])
            if number == END:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(number, "big"), payload))
